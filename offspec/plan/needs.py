"""Memory needs of opened models, by their sizes and settings: the input of a division of memory."""

from dataclasses import replace
from typing import Literal

import torch

from offspec.core.config import DraftBits, EngineConfig
from offspec.core.memory import MARGIN
from offspec.draft.forward import HEAD_ROWS
from offspec.draft.heads.base import OpenedHead
from offspec.model import devices
from offspec.model.experts import scratch_bytes
from offspec.model.fused.cuda_graph import PADDING
from offspec.model.fused.weights import packed_size
from offspec.model.loaded import LoadedModel
from offspec.model.recurrence import snapshots
from offspec.model.runner import PASS_ROWS, SHARED_PROMPT_ROWS
from offspec.plan.model_sizes import expert_sizes
from offspec.plan.opened import OpenedModels
from offspec.sampling.noise import CACHED_ROWS
from offspec_planners.memory_division import ExpertNeeds, FurtherGpus, HeadNeeds, HostNeeds, MemoryNeeds
from offspec_planners.placement import Placement, Tier
from offspec_planners.plan import MODEL_MODES, Part

# Storage of a draft: as stored on disk, as quantized values at 16 bits each, or packed. Without a draft
# model: whether heads draft, or nothing does.
DraftMode = Literal["full", "expanded", "packed", "head", "none"]
DraftStorage = tuple[DraftMode, DraftBits]

WIDEST = 64  # default maximum of nodes that a draft step expands

_CPU = torch.device("cpu")
_LARGEST_TREE = 1024  # nodes of one sequence's tree if several share a pass
_PARTS = 4  # maximum share of a pass's nodes for one sequence, for easily predicted text


def tree_nodes(config: EngineConfig) -> int:
    """Return the maximum nodes of one sequence's tree: if several share a pass, more than an equal part."""
    budget, sequences = config.budget or 1, config.min_sequences
    if sequences == 1:
        return budget
    return min(budget, -(-_PARTS * budget // sequences), _LARGEST_TREE)


def max_width(config: EngineConfig) -> int:
    """Return the maximum nodes that a draft step expands: no more than are verified."""
    return config.width or min(WIDEST, config.budget or 1)


def with_max_width(config: EngineConfig) -> EngineConfig:
    """Return a copy of the settings with the width of `max_width`."""
    return replace(config, width=max_width(config))


def draft_rows(config: EngineConfig) -> int:
    """Return the rows that a growing tree may take in the draft's cache, whatever width is chosen after
    loading.
    """
    return 2 * tree_nodes(config) + max_width(config)


def embedding_bytes(held: DraftStorage, draft: LoadedModel | None) -> int:
    """Return the bytes of RAM of a draft model's embedding."""
    return 0 if draft is None or held[0] not in MODEL_MODES else draft.embedding_bytes


def loading_bytes(held: DraftStorage, draft: LoadedModel | None) -> int:
    """Return the bytes of the draft layer that is being quantized or fused, both as stored and as values."""
    if draft is None or held[0] not in MODEL_MODES:
        return 0
    if draft.is_packed:
        return max(map(sum, zip(draft.unpacked_layer_bytes, draft.unpacked_conversion_bytes, strict=True)))
    return max(draft.layer_bytes) + max(draft.layer_conversion_bytes)


def unpacks_weights(draft: LoadedModel, bits: int) -> bool:
    """Return whether draft steps unpack weights of this many bits before they multiply."""
    return packed_size(draft.skeleton, bits, draft.device).scratch > 0


def draft_bytes(
    draft_storage: DraftStorage, draft: LoadedModel | None, config: EngineConfig, context: int
) -> int:
    """Return the bytes that a draft model takes on the computing device in this storage, including its
    caches.
    """
    mode, bits = draft_storage
    if draft is None or mode not in MODEL_MODES:
        return 0
    rows = context + draft_rows(config) + PADDING
    fixed = draft.cache_bytes(rows) + draft.state_bytes(draft_rows(config), snapshots.OF_DRAFT)
    fixed *= config.min_sequences
    fixed += 0 if config.uses_self_draft else draft.non_layer_bytes
    fixed += embedding_bytes(draft_storage, draft) if draft.device.type == "cpu" else 0
    if mode == "full":
        return fixed + sum(draft.unpacked_layer_bytes)
    if mode == "expanded":
        return fixed + sum(weight.nbytes for weight in draft.skeleton.layers.parameters())
    packed = packed_size(draft.skeleton, bits, draft.device)
    return fixed + packed.nbytes + packed.scratch * draft.dtype.itemsize


def memory_needs(
    opened: OpenedModels,
    config: EngineConfig,
    draft_storage: DraftStorage,
    context: int,
    chunk: int,
    caches: Tier,
    cpu_layers: tuple[int, ...],
) -> MemoryNeeds:
    """Return the memory needs with the draft in this storage.

    Args:
        opened: Models that memory is divided among.
        config: Settings with the largest budget and width that will be used.
        draft_storage: Draft mode and bits.
        context: Tokens of prompt and answer together.
        chunk: Rows of a prompt that run together.
        caches: Tier of the target's KV cache.
        cpu_layers: Layers that the CPU computes next to a device.
    """
    target, heads, sequences = opened.target, opened.heads, config.min_sequences
    on_gpu, budget, tree = target.device.type != "cpu", config.budget or 1, tree_nodes(config)
    capacity, rows = context + tree, context + draft_rows(config)
    vocabulary = target.skeleton.vocab_size
    together = min(capacity, PASS_ROWS + budget)  # rows of a pass
    if sequences > 1:
        together = max(together, min(sequences * capacity, SHARED_PROMPT_ROWS + budget))
    cpu_cache = sequences * target.cache_bytes(capacity, cpu_layers)
    states = sequences * target.state_bytes(tree, snapshots.MOST)
    cached, host_cache = sequences * target.cache_bytes(capacity) - cpu_cache, 0
    if caches is Tier.HOST:
        cached, host_cache = 2 * target.offload_buffer_bytes(capacity), cached
    runtime = devices.RUNTIME + devices.SLACK if target.device.type == "cuda" else 0
    activations, unpacking = target.activation_bytes(together, capacity, chunk), target.unpacking_bytes
    # States that layers carry from token to token are counted for every layer, since it is not known here
    # which have one.
    cpu = target.scratch_bytes(together, capacity, chunk, _CPU) + cpu_cache + states if cpu_layers else 0
    draft, loading = (
        draft_bytes(draft_storage, opened.draft, config, context),
        loading_bytes(draft_storage, opened.draft),
    )
    looked_up = target.embedding_bytes if opened.embeds else 0
    scores, logits = _score_bytes(config, vocabulary)
    # One is freed before the other is allocated, and freed memory is reused.
    if on_gpu:
        scratch = scores + max(logits, activations, loading)
    else:
        draft, scratch = draft + looked_up, scores + max(logits + activations, loading)
    # A self-draft uses the target's own head, and so do some small heads.
    shares_head = (config.uses_self_draft and draft_storage[0] in MODEL_MODES) or any(
        head.shares_head for head in heads
    )
    streamed_logits = 2 * max(budget, sequences, 2) * vocabulary * target.dtype.itemsize
    gpus, of_layer = opened.more_vram, sequences * target.layer_cache_bytes(capacity)
    free = tuple(vram - runtime - activations - unpacking - states for vram in gpus)
    return MemoryNeeds(
        process_bytes=opened.runtime + MARGIN,
        resident_bytes=target.non_layer_bytes,
        cache_bytes=cached + states,
        scratch_bytes=scratch + unpacking + _features_bytes(target, heads, together),
        draft_bytes=draft
        + sum(sequences * head.nbytes(rows) - (sequences - 1) * head.nbytes(0) for head in heads),
        layer_bytes=target.layer_bytes,
        extra_bytes=target.layer_conversion_bytes,
        device_runtime_bytes=runtime,
        cpu_layers=cpu_layers,
        head=None if shares_head else HeadNeeds(target.head_bytes, target.head_block_bytes, streamed_logits),
        host=HostNeeds(
            embedding_bytes=looked_up + embedding_bytes(draft_storage, opened.draft) if on_gpu else 0,
            cache_bytes=host_cache,
            cpu_bytes=cpu,
        ),
        further_gpus=FurtherGpus(free, of_layer, cached) if gpus else None,
        experts=None if cpu_layers or gpus else _expert_needs(target, min(together, chunk)),
    )


def _score_bytes(config: EngineConfig, vocabulary: int) -> tuple[int, int]:
    """Return (bytes of scores that stay for a request, including noise, bytes of the logits of a draft
    step).
    """
    sequences, width = config.min_sequences, max_width(config)
    drawn = tree_nodes(config) if config.verify == "sequoia" else 0  # distributions kept for verification
    # The scorers' workspace exists once.
    scores = (sequences * (CACHED_ROWS + drawn) + width) * 4 * vocabulary
    return scores, max(2 * width, HEAD_ROWS if sequences > 1 else 0) * 4 * vocabulary


def _expert_needs(target: LoadedModel, rows: int) -> ExpertNeeds | None:
    """Return the needs of experts if `rows` rows go through a layer together; None if layers contain them."""
    experts, sizes = target.experts, expert_sizes(target)
    if sizes is None:
        return None
    hidden = target.skeleton.config.hidden_size
    scratch = scratch_bytes(rows, sizes.chosen, hidden, sizes.weights, target.dtype.itemsize)
    return ExpertNeeds(
        target.dense_bytes,
        target.dense_conversion_bytes,
        experts.slot_bytes,
        experts.count,
        copied_bytes=experts.copied_bytes,
        unpacking_bytes=target.unpacking_bytes - target.dense_unpacking_bytes,
        cpu_bytes=scratch + experts.copied_bytes,
    )


def _features_bytes(target: LoadedModel, heads: tuple[OpenedHead, ...], rows: int) -> int:
    """Return the bytes of the states that a pass of `rows` rows keeps for heads."""
    layers = {layer for head in heads for layer in head.required_states.layers}
    last = any(head.required_states.last for head in heads)
    hidden: int = target.skeleton.config.hidden_size
    return (len(layers) + last) * rows * hidden * target.dtype.itemsize


def memory_parts(
    opened: OpenedModels, needs: MemoryNeeds, placement: Placement, *, unpacked: bool
) -> tuple[Part, ...]:
    """Return all parts that take memory under a placement, and the part that stays on disk.

    unpacked: Whether a packed target is unpacked at load.
    """
    target = opened.target
    needs = needs.with_expert_slots(placement.expert_slots, placement.host_expert_slots)
    layers = target.unpacked_layer_bytes if unpacked else needs.layer_bytes
    head = target.head_stored_bytes if placement.head is not Tier.DEVICE else 0
    slot = max(*needs.layer_bytes, target.head_block_bytes if head else 0)
    logits = needs.head.logits_bytes if head and needs.head is not None else 0
    first, *others = [
        sum(layers[i] for i in placement.resident if placement.gpu_of(i) == gpu)
        for gpu in range(1 + len(opened.more_vram))
    ]
    caches, more = needs.cache_bytes, needs.further_gpus
    if more is not None:
        caches += _caches_on(0, needs, placement) - more.cache_bytes
    below = (Tier.CPU, Tier.HOST, Tier.DISK)
    process = Tier.DEVICE if target.device.type == "cpu" else Tier.HOST
    found = [
        ("Python and libraries", process, needs.process_bytes),
        *(("layers", tier, sum(layers[layer] for layer in placement.layers(tier))) for tier in below),
        ("layers", Tier.DEVICE, first),
        ("head", placement.head, head or target.head_bytes),
        ("norms", Tier.DEVICE, needs.resident_bytes - target.head_bytes),
        ("caches", Tier.DEVICE, caches),
        ("caches", Tier.HOST, needs.host.cache_bytes),
        ("draft", Tier.DEVICE, needs.draft_bytes),
        ("the draft's embedding", Tier.HOST, needs.host.embedding_bytes),
        ("scratch", Tier.DEVICE, needs.scratch_bytes + logits + max(needs.extra_bytes)),
        ("slots", Tier.DEVICE, placement.slots * slot),
        ("experts", Tier.DEVICE, needs.expert_slots_bytes),
        ("experts", Tier.HOST, needs.host.expert_slots_bytes),
        ("experts", Tier.DISK, target.experts.nbytes if placement.on_demand_experts else 0),
        ("staging slots", Tier.HOST, placement.staging * slot * placement.gpu_count),
        ("caches and scratch", Tier.CPU, needs.host.cpu_bytes),
        ("CUDA context", Tier.DEVICE, needs.device_runtime_bytes),
    ]
    parts = [Part(what, tier, size) for what, tier, size in found if size > 0]
    for gpu, own in enumerate(others, 1):
        assert more is not None
        runtime = needs.device_runtime_bytes
        scratch = opened.more_vram[gpu - 1] - more.free_bytes[gpu - 1] - runtime + max(needs.extra_bytes)
        slots = placement.slots * slot if any(tier.streams for tier in placement.tiers_on(gpu)) else 0
        names = ("layers", "caches", "scratch", "slots", "CUDA context")
        sizes = (own, _caches_on(gpu, needs, placement), scratch, slots, runtime)
        parts += [Part(what, Tier.DEVICE, size, gpu) for what, size in zip(names, sizes, strict=True) if size]
    return tuple(parts)


def _caches_on(gpu: int, needs: MemoryNeeds, placement: Placement) -> int:
    """Return the bytes of the KV caches of the layers that one of several GPUs computes."""
    layers = sum(tier is not Tier.CPU for tier in placement.tiers_on(gpu))
    return 0 if needs.further_gpus is None else needs.further_gpus.layer_cache_bytes * layers
