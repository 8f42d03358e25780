"""Bytes that must fit: of a target, of what drafts for it, and of what both need to run."""

from dataclasses import dataclass
from typing import Literal

from offspec.core.config import DraftBits, EngineConfig
from offspec.draft.heads.base import OpenedHead
from offspec.model import device as devices
from offspec.model.fused.cuda_graph import PADDING
from offspec.model.loaded import LoadedModel
from offspec.model.quantize.resident_layers import rounded_bytes, unpacked_values
from offspec.plan.placement import Needs

# How a draft is held: as stored, as rounded values at 16 bits each, or packed. And where there is no model
# beside the target: whether heads draft, or nobody does.
DraftMode = Literal["full", "expanded", "packed", "head", "none"]
Held = tuple[DraftMode, DraftBits]

UNROUNDED: DraftBits = 16
WIDEST = 64  # nodes that a draft step expands at most, where the caller does not say

_COMPILER = 160_000_000  # bytes of the library whose code unpacks weights on a CPU


@dataclass(frozen=True, slots=True)
class Models:
    """What is to be loaded. draft: a model beside the target, or the target itself once more.

    runtime: bytes that the process takes without any weights.
    """

    target: LoadedModel
    draft: LoadedModel | None
    heads: tuple[OpenedHead, ...]
    runtime: int


def needs_of(models: Models, config: EngineConfig, held: Held, context: int, chunk: int) -> Needs:
    """What takes room with the draft held in this way. chunk: rows of a prompt at a time."""
    target, heads = models.target, models.heads
    budget = config.budget or 1
    capacity = context + budget
    vocabulary = target.skeleton.vocab_size
    rounded = held[0] in ("expanded", "packed", "full")
    # A substitute drafts with the target's own head, and so do some that are small.
    shares_head = (config.substitutes and rounded) or any(head.shares_head for head in heads)
    rows = context + draft_rows(config)
    drawn = budget if config.verify == "sequoia" else 0  # nodes whose distributions are kept for the walk
    return Needs(
        runtime=models.runtime,
        rest=target.rest_bytes,
        caches=target.cache_bytes(capacity),
        scratch=target.scratch_bytes(capacity, capacity, chunk)
        + (64 + 3 * (config.width or WIDEST) + drawn) * 4 * vocabulary
        + features_bytes(target, heads, capacity),
        draft=draft_bytes(held, models.draft, config, context) + sum(head.nbytes(rows) for head in heads),
        layers=target.layer_bytes,
        extra=target.layer_extra,
        head=0 if shares_head else target.head_bytes,
        block=target.head_block_bytes,
        logits=2 * max(budget, 2) * vocabulary * target.dtype.itemsize,
        device_runtime=devices.RUNTIME + devices.SLACK if target.device.type == "cuda" else 0,
    )


def features_bytes(target: LoadedModel, heads: tuple[OpenedHead, ...], rows: int) -> int:
    """Bytes of the states that a pass of so many rows keeps aside for heads."""
    layers = {layer for head in heads for layer in head.wants.layers}
    last = any(head.wants.last for head in heads)
    hidden: int = target.skeleton.config.hidden_size
    return (len(layers) + last) * rows * hidden * target.dtype.itemsize


def draft_bytes(held: Held, draft: LoadedModel | None, config: EngineConfig, context: int) -> int:
    """Bytes that a draft's model takes when it is held in this way, its cache included."""
    mode, bits = held
    if draft is None or mode in ("head", "none"):
        return 0
    rows = context + draft_rows(config) + PADDING
    fixed = draft.cache_bytes(rows) + (0 if config.substitutes else draft.rest_bytes)
    # The layer that is being rounded or fused, as it is on disk and as values.
    if draft.is_packed:
        fixed += max(map(sum, zip(draft.held_bytes, draft.held_extra, strict=True)))
    else:
        fixed += max(draft.layer_bytes) + max(draft.layer_extra)
    if mode == "full":
        return fixed + sum(draft.held_bytes)
    layers = draft.skeleton.layers
    if mode == "expanded":
        return fixed + sum(weight.nbytes for weight in layers.parameters())
    unpacked = max(map(unpacked_values, layers)) * draft.dtype.itemsize
    if draft.device.type == "cpu" and not draft.is_packed:  # else the process has it already
        unpacked += _COMPILER
    return fixed + sum(rounded_bytes(layer, bits) for layer in layers) + unpacked


def draft_rows(config: EngineConfig) -> int:
    """Rows that a growing tree may take in the draft's cache, whatever width is chosen once it is loaded."""
    return 2 * (config.budget or 1) + (config.width or WIDEST)
