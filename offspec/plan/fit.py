"""What fits where: the context, how the draft is held, and the tier of each layer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from offspec.core.config import DraftBits, EngineConfig, format_bytes
from offspec.core.errors import CapacityError, RequestError
from offspec.core.memory import MARGIN
from offspec.model.loaded import LoadedModel
from offspec.model.runner import CHUNK, SMALL_CHUNK
from offspec.plan.needs import UNROUNDED, DraftMode, Held, Models, draft_bytes, needs_of
from offspec.plan.placement import divide, placement_fits
from offspec_planners.placement import Placement, Tier

_SUBSTITUTE_BITS: tuple[DraftBits, ...] = (4, 3, 2)  # tried in turn when the caller does not say

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
    draft_bits: DraftBits = UNROUNDED


def decide(
    config: EngineConfig,
    given: int,
    device_memory: int | None,
    models: Models,
    share: float = 1.0,
) -> Fit:
    """The first arrangement that fits: the best draft, then the longest context; see `_choices`.

    given: bytes of RAM for the process; device_memory: bytes of the device, None where it computes in RAM.
    config.budget and .width: the most that will be used. share: of its bytes that each layer takes, where
    that is asked for.
    Raises CapacityError, RequestError for a context that is over the model's.
    """
    failure: CapacityError | None = None
    for held, context in _choices(config, models):
        found: Fit | None = None
        for chunk in (CHUNK, SMALL_CHUNK):
            needs = needs_of(models, config, held, context, chunk)
            needs = replace(needs, layers=[int(size * share) for size in needs.layers])
            try:
                fit = Fit(context, held[0], divide(given, needs, device_memory), chunk, held[1])
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


def _choices(config: EngineConfig, models: Models) -> list[tuple[Held, int]]:
    """How a draft may be held and how long the context may be, the most wanted first.

    A conversation wants room: a context that would soon be full is taken only where no other fits.
    """
    lengths = _contexts(config, models.target)
    choices = [(held, length) for held in _modes(config, models) for length in lengths]
    if config.converses:
        longest = models.target.skeleton.context_length
        choices.sort(key=lambda choice: choice[1] < min(_CONVERSATION, longest))
    return choices


def holds(
    fit: Fit,
    config: EngineConfig,
    given: int,
    device_memory: int | None,
    models: Models,
) -> bool:
    """Whether an arrangement that was made before fits these models and this memory; see `decide`."""
    held, target = (fit.draft_mode, fit.draft_bits), models.target
    if len(fit.placement.tiers) != len(target.layers) or held not in _modes(config, models):
        return False
    if fit.context > target.skeleton.context_length:
        return False
    needs = needs_of(models, config, held, fit.context, fit.chunk)
    if fit.placement.head is not Tier.DEVICE and not needs.head:
        return False
    return placement_fits(given, needs, fit.placement, device_memory)


def unpacks(
    fit: Fit,
    config: EngineConfig,
    given: int,
    device_memory: int | None,
    models: Models,
) -> bool:
    """Whether there is room to unpack a packed target as it is loaded, all of which then stays.

    Its passes then need not, which is worth more than anything else that the room could hold.
    """
    target = models.target
    stays = len(fit.placement.resident) == len(target.layers) and fit.placement.head is Tier.DEVICE
    if not target.is_packed or not stays:
        return False
    needs = needs_of(models, config, (fit.draft_mode, fit.draft_bits), fit.context, fit.chunk)
    needs = replace(needs, layers=target.held_bytes, extra=target.held_extra)
    return placement_fits(given, needs, fit.placement, device_memory)


def _contexts(config: EngineConfig, target: LoadedModel) -> list[int]:
    longest = target.skeleton.context_length
    if config.context is None:
        return [length for length in _CONTEXTS if length <= longest] or [longest]
    if config.context > longest:
        raise RequestError(f"a context of {config.context} is over the model's {longest}")
    return [config.context]


def _modes(config: EngineConfig, models: Models) -> list[Held]:
    """How a draft may be held, the most wanted first: as fast as can be, then in as many bits as can be."""
    alone: Held = ("head" if models.heads else "none", UNROUNDED)
    if models.draft is None:
        return [alone]
    if not config.substitutes and config.draft_bits in (None, UNROUNDED):
        return [("full", UNROUNDED)]
    widths = _SUBSTITUTE_BITS if config.draft_bits is None else (config.draft_bits,)
    held: list[Held] = [("expanded", widths[0]), *(("packed", bits) for bits in widths)]
    return [*held, alone] if config.substitutes else held


def parts(
    config: EngineConfig,
    models: Models,
    fit: Fit,
    layers: Sequence[int],
) -> tuple[tuple[str, str, int], ...]:
    """(what, tier, bytes) of all that takes room under an arrangement, and of what stays on disk.

    layers: bytes of each layer of the target, as it is held.
    """
    needs = needs_of(models, config, (fit.draft_mode, fit.draft_bits), fit.context, fit.chunk)
    target = models.target
    placement, apart = fit.placement, target.device.type != "cpu"
    head = target.head_stored_bytes if placement.head is not Tier.DEVICE else 0
    slot = max(*target.layer_bytes, target.head_block_bytes if head else 0)
    found = [("Python and libraries", Tier.HOST if apart else Tier.DEVICE, needs.runtime + MARGIN)]
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
    """In a clause, why a substitute was left out, and what to do about it."""
    bits = config.draft_bits or _SUBSTITUTE_BITS[-1]
    needed = draft_bytes(("packed", bits), draft, config, config.context or _CONTEXTS[-1])
    memory_given, option = (given, "--memory") if vram is None else (vram, "--vram")
    return (
        f"a {bits}-bit substitute of the target takes {format_bytes(needed)}, too much beside it in "
        f"{format_bytes(memory_given)}: name a smaller model with --draft, or give more {option}"
    )
