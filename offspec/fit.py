"""What fits where: the context, how the draft is held, and the tier of each layer."""

from dataclasses import dataclass
from typing import Literal

from offspec import device as devices
from offspec import memory
from offspec.config import EngineConfig, format_bytes
from offspec.errors import CapacityError, RequestError
from offspec.model.lean_graph import PADDING
from offspec.model.loaded import LoadedModel
from offspec.model.packing import packed_bytes
from offspec.model.runner import CHUNK, SMALL_CHUNK
from offspec_planners.placement import Placement, Tier

# How a draft is held: as stored, as 4-bit values at 16 bits each, packed, or not at all.
DraftMode = Literal["full", "expanded", "packed", "none"]

WIDEST = 64  # nodes that a draft step expands at most, where the caller does not say

_CONTEXTS = (4096, 2048, 1024, 512)  # tried in turn when the caller does not say
_CONVERSATION = 2048  # tokens that some turns of a conversation take


@dataclass(frozen=True, slots=True)
class Fit:
    """What was decided. context: tokens of prompt and answer together; chunk: rows of a prompt at a time."""

    context: int
    draft_mode: DraftMode
    placement: Placement
    chunk: int = CHUNK


def decide(
    config: EngineConfig,
    given: int,
    device_memory: int | None,
    target: LoadedModel,
    draft: LoadedModel | None,
    runtime: int,
) -> Fit:
    """The first arrangement that fits: the fastest draft, then the longest context; see `_choices`.

    given: bytes of RAM for the process; device_memory: bytes of the device, None where it computes in RAM.
    config.budget and .width: the most that will be used. runtime: bytes that the process takes without
    any weights.
    Raises CapacityError, RequestError for a context that is over the model's.
    """
    failure: CapacityError | None = None
    for mode, context in _choices(config, target, draft):
        found: Fit | None = None
        for chunk in (CHUNK, SMALL_CHUNK):
            needs = _needs(config, target, draft, mode, context, runtime, chunk)
            try:
                fit = Fit(context, mode, memory.divide(given, needs, device_memory), chunk)
            except CapacityError as error:
                if failure is None or error.needed < failure.needed:
                    failure = error
                continue
            # Where not even one layer stays, a smaller chunk may make room for one, a slot or the head.
            if found is None or fit.placement != found.placement:
                found = fit
            if found.placement.resident:
                break
        if found is not None:
            return found
    assert failure is not None
    raise failure


def _choices(
    config: EngineConfig, target: LoadedModel, draft: LoadedModel | None
) -> list[tuple[DraftMode, int]]:
    """How a draft may be held and how long the context may be, the most wanted first.

    A conversation wants room: a context that would soon be full is taken only where no other fits.
    """
    choices = [(mode, length) for mode in _modes(config, draft) for length in _contexts(config, target)]
    if config.converses:
        choices.sort(key=lambda choice: choice[1] < min(_CONVERSATION, target.skeleton.context_length))
    return choices


def holds(
    fit: Fit,
    config: EngineConfig,
    given: int,
    device_memory: int | None,
    target: LoadedModel,
    draft: LoadedModel | None,
    runtime: int,
) -> bool:
    """Whether an arrangement that was made before fits these models and this memory; see `decide`."""
    if len(fit.placement.tiers) != len(target.layers) or fit.draft_mode not in _modes(config, draft):
        return False
    if fit.context > target.skeleton.context_length:
        return False
    needs = _needs(config, target, draft, fit.draft_mode, fit.context, runtime, fit.chunk)
    if fit.placement.head is not Tier.DEVICE and not needs.head:
        return False
    return memory.holds(given, needs, fit.placement, device_memory)


def _contexts(config: EngineConfig, target: LoadedModel) -> list[int]:
    longest = target.skeleton.context_length
    if config.context is None:
        return [length for length in _CONTEXTS if length <= longest] or [longest]
    if config.context > longest:
        raise RequestError(f"a context of {config.context} is over the model's {longest}")
    return [config.context]


def _modes(config: EngineConfig, draft: LoadedModel | None) -> tuple[DraftMode, ...]:
    if draft is None:
        return ("none",)
    if config.draft == "auto":
        return ("expanded", "packed", "none")
    return ("expanded", "packed") if config.draft_bits == 4 else ("full",)


def _needs(
    config: EngineConfig,
    target: LoadedModel,
    draft: LoadedModel | None,
    mode: DraftMode,
    context: int,
    runtime: int,
    chunk: int,
) -> memory.Needs:
    budget = config.budget or 1
    capacity = context + budget
    vocabulary = target.skeleton.vocab_size
    shares_head = config.draft == "auto" and mode != "none"  # a substitute drafts with the target's own head
    return memory.Needs(
        runtime=runtime,
        rest=target.rest_bytes,
        caches=target.cache_bytes(capacity),
        scratch=target.scratch_bytes(capacity, capacity, chunk)
        + (64 + 3 * (config.width or WIDEST)) * 4 * vocabulary,
        draft=draft_bytes(mode, draft, config, context),
        layers=target.layer_bytes,
        extra=target.layer_extra,
        head=0 if shares_head else target.head_bytes,
        block=target.head_block_bytes,
        logits=2 * max(budget, 2) * vocabulary * target.dtype.itemsize,
        device_runtime=devices.RUNTIME + devices.SLACK if target.device.type == "cuda" else 0,
    )


def draft_bytes(mode: DraftMode, draft: LoadedModel | None, config: EngineConfig, context: int) -> int:
    """Bytes that the draft takes when it is held in this way, its cache included."""
    if draft is None or mode == "none":
        return 0
    rows = context + draft_rows(config) + PADDING
    shared = config.draft == "auto"
    fixed = draft.cache_bytes(rows) + (0 if shared else draft.rest_bytes)
    fixed += max(draft.layer_bytes) + max(draft.layer_extra)  # the layer that is being rounded or fused
    if mode == "full":
        return fixed + sum(
            size + extra for size, extra in zip(draft.layer_bytes, draft.layer_extra, strict=True)
        )
    if mode == "expanded":
        return fixed + sum(elements * draft.dtype.itemsize for elements in draft.layer_elements)
    # One layer is unpacked at a time.
    unpacked = max(draft.layer_elements) * draft.dtype.itemsize
    return fixed + sum(packed_bytes(elements) for elements in draft.layer_elements) + unpacked


def parts(
    config: EngineConfig, target: LoadedModel, draft: LoadedModel | None, fit: Fit, runtime: int
) -> tuple[tuple[str, str, int], ...]:
    """(what, tier, bytes) of all that takes room under an arrangement, and of what stays on disk."""
    needs = _needs(config, target, draft, fit.draft_mode, fit.context, runtime, fit.chunk)
    placement, apart = fit.placement, target.device.type != "cpu"
    head = target.head_bytes if placement.head is not Tier.DEVICE else 0
    slot = max(*target.layer_bytes, target.head_block_bytes if head else 0)
    found = [("Python and libraries", Tier.HOST if apart else Tier.DEVICE, needs.runtime + memory.MARGIN)]
    found += [
        ("layers", tier, sum(target.layer_bytes[layer] for layer in placement.layers(tier))) for tier in Tier
    ]
    found += [
        ("head", placement.head, head or target.head_bytes),
        ("norms", Tier.DEVICE, needs.rest - target.head_bytes),
        ("caches", Tier.DEVICE, needs.caches),
        ("draft", Tier.DEVICE, needs.draft),
        ("scratch", Tier.DEVICE, needs.scratch + (needs.logits if head else 0) + max(needs.extra)),
        ("slots", Tier.DEVICE, placement.slots * slot),
        ("staging slots", Tier.HOST, placement.staging * slot),
        ("the device's own share", Tier.DEVICE, needs.device_runtime),
    ]
    return tuple((what, str(tier), size) for what, tier, size in found if size > 0)


def no_room(config: EngineConfig, given: int, vram: int | None, draft: LoadedModel) -> str:
    """The notice that a substitute was left out, and what to do about it."""
    needed = draft_bytes("packed", draft, config, config.context or _CONTEXTS[-1])
    memory_given, option = (given, "--memory") if vram is None else (vram, "--vram")
    return (
        f"no draft: a 4-bit substitute of the target takes {format_bytes(needed)}, too much beside it in "
        f"{format_bytes(memory_given)}; name a smaller model with --draft, or give more {option}"
    )


def draft_rows(config: EngineConfig) -> int:
    """Rows that a growing tree may take in the draft's cache, whatever width is chosen once it is loaded."""
    return 2 * (config.budget or 1) + (config.width or WIDEST)
