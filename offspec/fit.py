"""What fits where: the context, how the draft is held, and the tier of each layer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from offspec import device as devices
from offspec import memory
from offspec.config import DraftBits, EngineConfig, format_bytes
from offspec.errors import CapacityError, RequestError
from offspec.model.lean_graph import PADDING
from offspec.model.loaded import LoadedModel
from offspec.model.packed_layers import rounded_bytes, unpacked_values
from offspec.model.runner import CHUNK, SMALL_CHUNK
from offspec_planners.placement import Placement, Tier

# How a draft is held: as stored, as rounded values at 16 bits each, packed, or not at all.
DraftMode = Literal["full", "expanded", "packed", "none"]
Held = tuple[DraftMode, DraftBits]

_SUBSTITUTE_BITS: tuple[DraftBits, ...] = (4, 3, 2)  # tried in turn when the caller does not say
_UNROUNDED: DraftBits = 16
_COMPILER = 160_000_000  # bytes of the library whose code unpacks weights on a CPU

WIDEST = 64  # nodes that a draft step expands at most, where the caller does not say

_CONTEXTS = (4096, 2048, 1024, 512)  # tried in turn when the caller does not say
_CONVERSATION = 2048  # tokens that some turns of a conversation take


@dataclass(frozen=True, slots=True)
class Fit:
    """What was decided. context: tokens of prompt and answer together; chunk: rows of a prompt at a time;
    draft_bits: that the draft's matrices are rounded to, 16 where they are not, or where nobody drafts.
    """

    context: int
    draft_mode: DraftMode
    placement: Placement
    chunk: int = CHUNK
    draft_bits: DraftBits = _UNROUNDED


def decide(
    config: EngineConfig,
    given: int,
    device_memory: int | None,
    target: LoadedModel,
    draft: LoadedModel | None,
    runtime: int,
    share: float = 1.0,
) -> Fit:
    """The first arrangement that fits: the best draft, then the longest context; see `_choices`.

    given: bytes of RAM for the process; device_memory: bytes of the device, None where it computes in RAM.
    config.budget and .width: the most that will be used. runtime: bytes that the process takes without
    any weights. share: of its bytes that each layer takes, where that is asked for.
    Raises CapacityError, RequestError for a context that is over the model's.
    """
    failure: CapacityError | None = None
    for held, context in _choices(config, target, draft):
        found: Fit | None = None
        for chunk in (CHUNK, SMALL_CHUNK):
            needs = _needs(config, target, draft, held, context, runtime, chunk)
            needs = replace(needs, layers=[int(size * share) for size in needs.layers])
            try:
                fit = Fit(context, held[0], memory.divide(given, needs, device_memory), chunk, held[1])
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


def _choices(config: EngineConfig, target: LoadedModel, draft: LoadedModel | None) -> list[tuple[Held, int]]:
    """How a draft may be held and how long the context may be, the most wanted first.

    A conversation wants room: a context that would soon be full is taken only where no other fits.
    """
    choices = [(held, length) for held in _modes(config, draft) for length in _contexts(config, target)]
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
    held = fit.draft_mode, fit.draft_bits
    if len(fit.placement.tiers) != len(target.layers) or held not in _modes(config, draft):
        return False
    if fit.context > target.skeleton.context_length:
        return False
    needs = _needs(config, target, draft, held, fit.context, runtime, fit.chunk)
    if fit.placement.head is not Tier.DEVICE and not needs.head:
        return False
    return memory.holds(given, needs, fit.placement, device_memory)


def unpacks(
    fit: Fit,
    config: EngineConfig,
    given: int,
    device_memory: int | None,
    target: LoadedModel,
    draft: LoadedModel | None,
    runtime: int,
) -> bool:
    """Whether there is room to unpack a packed target as it is loaded, all of which then stays.

    Its passes then need not, which is worth more than anything else that the room could hold.
    """
    stays = len(fit.placement.resident) == len(target.layers) and fit.placement.head is Tier.DEVICE
    if not target.is_packed or not stays:
        return False
    held = fit.draft_mode, fit.draft_bits
    needs = _needs(config, target, draft, held, fit.context, runtime, fit.chunk)
    needs = replace(needs, layers=target.held_bytes, extra=target.held_extra)
    return memory.holds(given, needs, fit.placement, device_memory)


def _contexts(config: EngineConfig, target: LoadedModel) -> list[int]:
    longest = target.skeleton.context_length
    if config.context is None:
        return [length for length in _CONTEXTS if length <= longest] or [longest]
    if config.context > longest:
        raise RequestError(f"a context of {config.context} is over the model's {longest}")
    return [config.context]


def _modes(config: EngineConfig, draft: LoadedModel | None) -> list[Held]:
    """How a draft may be held, the most wanted first: as fast as can be, then in as many bits as can be."""
    if draft is None:
        return [("none", _UNROUNDED)]
    if config.draft != "auto" and config.draft_bits in (None, _UNROUNDED):
        return [("full", _UNROUNDED)]
    widths = _SUBSTITUTE_BITS if config.draft_bits is None else (config.draft_bits,)
    held: list[Held] = [("expanded", widths[0]), *(("packed", bits) for bits in widths)]
    return [*held, ("none", _UNROUNDED)] if config.draft == "auto" else held


def _needs(
    config: EngineConfig,
    target: LoadedModel,
    draft: LoadedModel | None,
    held: Held,
    context: int,
    runtime: int,
    chunk: int,
) -> memory.Needs:
    budget = config.budget or 1
    capacity = context + budget
    vocabulary = target.skeleton.vocab_size
    shares_head = config.draft == "auto" and held[0] != "none"  # a substitute drafts with the target's
    return memory.Needs(
        runtime=runtime,
        rest=target.rest_bytes,
        caches=target.cache_bytes(capacity),
        scratch=target.scratch_bytes(capacity, capacity, chunk)
        + (64 + 3 * (config.width or WIDEST)) * 4 * vocabulary,
        draft=draft_bytes(held, draft, config, context),
        layers=target.layer_bytes,
        extra=target.layer_extra,
        head=0 if shares_head else target.head_bytes,
        block=target.head_block_bytes,
        logits=2 * max(budget, 2) * vocabulary * target.dtype.itemsize,
        device_runtime=devices.RUNTIME + devices.SLACK if target.device.type == "cuda" else 0,
    )


def draft_bytes(held: Held, draft: LoadedModel | None, config: EngineConfig, context: int) -> int:
    """Bytes that the draft takes when it is held in this way, its cache included."""
    mode, bits = held
    if draft is None or mode == "none":
        return 0
    rows = context + draft_rows(config) + PADDING
    shared = config.draft == "auto"
    fixed = draft.cache_bytes(rows) + (0 if shared else draft.rest_bytes)
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


def parts(
    config: EngineConfig,
    target: LoadedModel,
    draft: LoadedModel | None,
    fit: Fit,
    runtime: int,
    layers: Sequence[int],
) -> tuple[tuple[str, str, int], ...]:
    """(what, tier, bytes) of all that takes room under an arrangement, and of what stays on disk.

    layers: bytes of each layer of the target, as it is held.
    """
    needs = _needs(config, target, draft, (fit.draft_mode, fit.draft_bits), fit.context, runtime, fit.chunk)
    placement, apart = fit.placement, target.device.type != "cpu"
    head = target.head_stored_bytes if placement.head is not Tier.DEVICE else 0
    slot = max(*target.layer_bytes, target.head_block_bytes if head else 0)
    found = [("Python and libraries", Tier.HOST if apart else Tier.DEVICE, needs.runtime + memory.MARGIN)]
    found += [("layers", tier, sum(layers[layer] for layer in placement.layers(tier))) for tier in Tier]
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
    bits = config.draft_bits or _SUBSTITUTE_BITS[-1]
    needed = draft_bytes(("packed", bits), draft, config, config.context or _CONTEXTS[-1])
    memory_given, option = (given, "--memory") if vram is None else (vram, "--vram")
    return (
        f"no draft: a {bits}-bit substitute of the target takes {format_bytes(needed)}, too much beside it "
        f"in {format_bytes(memory_given)}; name a smaller model with --draft, or give more {option}"
    )


def draft_rows(config: EngineConfig) -> int:
    """Rows that a growing tree may take in the draft's cache, whatever width is chosen once it is loaded."""
    return 2 * (config.budget or 1) + (config.width or WIDEST)
