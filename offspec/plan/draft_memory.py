"""Memory of a draft: where it is computed, in RAM next to that, and while it is loaded."""

from dataclasses import replace
from typing import Literal

from offspec.core.config import DraftBits, EngineConfig
from offspec.model.fused.cuda_graph import PADDING
from offspec.model.fused.weights import packed_size
from offspec.model.loaded import LoadedModel
from offspec.model.recurrence import snapshots
from offspec_planners.plan import MODEL_MODES

# How a draft is held: as stored, as rounded values at 16 bits each, or packed. And where there is no model
# in addition to the target: whether heads draft, or nothing does.
DraftMode = Literal["full", "expanded", "packed", "head", "none"]
Held = tuple[DraftMode, DraftBits]

WIDEST = 64  # nodes that a draft step expands at most, where the caller does not say


_LARGEST_TREE = 1024  # nodes of one sequence's tree where several share a pass
_PARTS = 4  # of the nodes of a pass that a sequence may have, as one of them easily guessed


def tree_nodes(config: EngineConfig) -> int:
    """Most nodes of the tree of one sequence: of those that several share, more than its equal part."""
    budget, sequences = config.budget or 1, config.least_sequences
    if sequences == 1:
        return budget
    return min(budget, -(-_PARTS * budget // sequences), _LARGEST_TREE)


def most_width(config: EngineConfig) -> int:
    """Nodes that a draft step expands at most: no more than are verified, of which the best are expanded."""
    return config.width or min(WIDEST, config.budget or 1)


def with_most_width(config: EngineConfig) -> EngineConfig:
    """Copy of the settings with the width of `most_width`."""
    return replace(config, width=most_width(config))


def draft_rows(config: EngineConfig) -> int:
    """Rows that a growing tree may take in the draft's cache, whatever width is chosen once it is loaded."""
    return 2 * tree_nodes(config) + most_width(config)


def embedding_bytes(held: Held, draft: LoadedModel | None) -> int:
    """Bytes of RAM of the embedding of a draft that is a model."""
    return 0 if draft is None or held[0] not in MODEL_MODES else draft.embedding_bytes


def loading_bytes(held: Held, draft: LoadedModel | None) -> int:
    """Bytes of the layer of a draft that is being rounded or fused, as it is on disk and as values."""
    if draft is None or held[0] not in MODEL_MODES:
        return 0
    if draft.is_packed:
        return max(map(sum, zip(draft.held_bytes, draft.held_extra, strict=True)))
    return max(draft.layer_bytes) + max(draft.layer_extra)


def unpacks(draft: LoadedModel, bits: int) -> bool:
    """Whether draft steps unpack weights of this many bits before they multiply."""
    return packed_size(draft.skeleton, bits, draft.device).scratch > 0


def draft_bytes(held: Held, draft: LoadedModel | None, config: EngineConfig, context: int) -> int:
    """Bytes that a draft's model takes where it is computed, held in this way, its caches included."""
    mode, bits = held
    if draft is None or mode not in MODEL_MODES:
        return 0
    rows = context + draft_rows(config) + PADDING
    fixed = draft.cache_bytes(rows) + draft.state_bytes(draft_rows(config), snapshots.OF_DRAFT)
    fixed *= config.least_sequences
    fixed += 0 if config.substitutes else draft.rest_bytes
    fixed += embedding_bytes(held, draft) if draft.device.type == "cpu" else 0
    if mode == "full":
        return fixed + sum(draft.held_bytes)
    if mode == "expanded":
        return fixed + sum(weight.nbytes for weight in draft.skeleton.layers.parameters())
    packed = packed_size(draft.skeleton, bits, draft.device)
    return fixed + packed.nbytes + packed.scratch * draft.dtype.itemsize
