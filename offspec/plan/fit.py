"""Fit of opened models in memory: the context, how the draft is held, and the tier of each layer."""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import cast

from offspec.core.config import LOOKUPS, DraftBits, EngineConfig
from offspec.core.errors import CapacityError, RequestError
from offspec.model.loaded import LoadedModel
from offspec.model.runner import CHUNK, SMALL_CHUNK
from offspec.plan.needs import DraftMode, Held, draft_bytes, loading_bytes, memory_needs, tree_nodes, unpacks
from offspec.plan.opened import OpenedModels
from offspec_planners.memory_division import CPU_LAYERS, Needs, divide, placement_fits
from offspec_planners.placement import Placement, Tier, TooSmallError, cpu_layers
from offspec_planners.plan import MODEL_MODES, Plan
from offspec_planners.units import format_bytes

UNROUNDED: DraftBits = 16
LEAST_BUDGET = 16  # nodes that there must be room for beside a draft
LOOKED_UP = {"cpu": 64, "cuda": 128}  # nodes where lookups are by themselves, which take no time to draft

_SUBSTITUTE_BITS: tuple[DraftBits, ...] = (4, 3, 2)  # tried in turn when the caller does not say
_SEQUENCES = (8, 4, 2)  # tried in turn when the caller does not say
_DISPLACED = 0.05  # of the layers that sequences may take the place of: most of a pass is its trip
_CONTEXTS = (4096, 2048, 1024, 512)  # tried in turn when the caller does not say
_CONVERSATION = 2048  # tokens that some turns of a conversation take


@dataclass(frozen=True, slots=True)
class Fit:
    """Division of memory that was decided.

    Args:
        context: Tokens of prompt and answer together.
        draft_mode: How the draft is held.
        placement: Tier of each layer and of the head.
        chunk: Rows of a prompt that run together.
        draft_bits: Bits of the draft's matrices, 16 where they are not rounded, or there is no draft.
    """

    context: int
    draft_mode: DraftMode
    placement: Placement
    chunk: int = CHUNK
    draft_bits: DraftBits = UNROUNDED

    @classmethod
    def of_plan(cls, plan: Plan) -> "Fit":
        """Division of memory that a plan records."""
        mode, bits = cast(DraftMode, plan.draft_mode), cast(DraftBits, plan.draft_bits)
        return cls(plan.context, mode, plan.placement, plan.chunk, bits)

    @property
    def held(self) -> Held:
        """Draft mode and bits."""
        return self.draft_mode, self.draft_bits

    @property
    def drafts_with_model(self) -> bool:
        """Whether memory is set aside for a model that drafts."""
        return self.draft_mode in MODEL_MODES


def find_fit(
    opened: OpenedModels, config: EngineConfig, share: float = 1.0, *, held: Held | None = None
) -> Fit:
    """Find the first arrangement that fits: the best draft, then the longest context; see `_choices`.

    Args:
        opened: Models that memory is divided among.
        config: Settings whose budget and width are the most that will be used.
        share: Size of each layer, as a part of what it is.
        held: How the draft is held, whatever the settings say. None: by the settings.

    Raises:
        CapacityError: Nothing fits.
        RequestError: A context that is over the model's.
    """
    failures = list[TooSmallError]()
    for way, context in _choices(opened, config):
        for caches in _cache_tiers(opened, config):
            try:
                return _arranged(opened, config, held or way, context, caches, share)
            except TooSmallError as error:
                failures.append(error)
    # What fails in RAM would do on the device.
    raise _capacity_error(min(failures, key=lambda error: (error.where is Tier.DEVICE, error.needed)))


def try_fit(
    opened: OpenedModels, config: EngineConfig, share: float = 1.0, *, held: Held | None = None
) -> Fit | None:
    """`find_fit`, or None if nothing fits."""
    with suppress(CapacityError):
        return find_fit(opened, config, share, held=held)
    return None


def _cache_tiers(opened: OpenedModels, config: EngineConfig) -> tuple[Tier, ...]:
    """Tiers that the target's KV cache may be in: RAM only for a context that was asked for."""
    one = opened.vram is not None and not opened.more_vram and not config.cpu_layers  # computes all layers
    one = one and config.least_sequences == 1  # to which the windows belong
    moves = one and config.context is not None and opened.target.caches_move
    return (Tier.DEVICE, Tier.HOST) if moves else (Tier.DEVICE,)


def _arranged(
    opened: OpenedModels, config: EngineConfig, held: Held, context: int, caches: Tier, share: float
) -> Fit:
    """Fit with the draft held in this way, and caches in this tier. Raises TooSmallError."""
    found: Fit | None = None
    failures = list[TooSmallError]()
    cpu = cpu_layers(len(opened.target.layers), config.cpu_layers or 0)
    for chunk in (CHUNK, SMALL_CHUNK):
        needs = memory_needs(opened, config, held, context, chunk, caches, cpu).scaled(share)
        try:
            placed = divide(opened.memory, needs, opened.vram, cpu_experts=config.experts == "cpu")
        except TooSmallError as error:
            failures.append(error)
            continue
        placement = replace(placed, caches=caches)
        # Where not even one layer stays, a smaller chunk may make room for one, a slot or the head.
        if found is None or placement != found.placement:
            found = Fit(context, held[0], placement, chunk, held[1])
        if found.placement.resident:
            break
    if found is None:
        raise min(failures, key=lambda error: error.needed)
    return found


def _capacity_error(error: TooSmallError) -> CapacityError:
    """Error for a memory limit that is too small, with what would do and what it goes to."""
    kind, option = ("device memory", "vram") if error.where is Tier.DEVICE else ("memory", "memory")
    listing = ", ".join(f"{name} {format_bytes(size)}" for name, size in error.parts.items() if size)
    fewer = " or `cpu_layers`" if error.parts[CPU_LAYERS] else ""
    return CapacityError(
        f"{format_bytes(error.given)} of {kind} is too little: the least that would do is "
        f"{format_bytes(-(-error.needed // 10**7) * 10**7)} ({listing}); "
        f"give more `{option}` or ask for less `context`{fewer}",
        needed=error.needed,
        given=error.given,
    )


def still_fits(opened: OpenedModels, config: EngineConfig, fit: Fit) -> bool:
    """Whether an arrangement that was made before fits."""
    modes = [*_modes(opened, config), _undrafted(opened)]  # a plan may leave the draft out
    if len(fit.placement.tiers) != len(opened.target.layers) or fit.held not in modes:
        return False
    if fit.context > opened.target.skeleton.context_length:
        return False
    tiers = (Tier.DEVICE, *_cache_tiers(opened, replace(config, context=fit.context)))
    if fit.placement.caches not in tiers:
        return False
    needs = fit_needs(opened, config, fit)
    if fit.placement.head is not Tier.DEVICE and needs.head is None:
        return False
    return placement_fits(opened.memory, needs, fit.placement, opened.vram)


def fit_needs(opened: OpenedModels, config: EngineConfig, fit: Fit) -> Needs:
    """Needs for memory under an arrangement."""
    placed, cpu = fit.placement, fit.placement.layers(Tier.CPU)
    return memory_needs(opened, config, fit.held, fit.context, fit.chunk, placed.caches, cpu)


def keeps_unpacked(opened: OpenedModels, config: EngineConfig, fit: Fit) -> bool:
    """Whether there is room to unpack a packed target as it is loaded, all of which then stays.

    Its passes then need not, which is worth more than anything else that the room could hold.
    """
    target = opened.target
    stays = len(fit.placement.resident) == len(target.layers) and fit.placement.head is Tier.DEVICE
    stays = stays and not fit.placement.by_need
    if not target.is_packed or not stays:
        return False
    needs = fit_needs(opened, config, fit)
    needs = replace(needs, layer_bytes=target.held_bytes, extra_bytes=target.held_extra)
    return placement_fits(opened.memory, needs, fit.placement, opened.vram)


def most_sequences(opened: OpenedModels, config: EngineConfig) -> int:
    """Number of sequences that fit with the same draft and context, and hardly a layer less in memory."""
    wanted = replace(config, budget=config.budget or LEAST_BUDGET)
    alone = find_fit(opened, replace(wanted, sequences=1))
    for count in _SEQUENCES:
        fit = try_fit(opened, replace(wanted, sequences=count))
        if fit is not None and (fit.context, fit.held) == (alone.context, alone.held):
            lost = len(alone.placement.resident) - len(fit.placement.resident)
            if lost <= _DISPLACED * len(opened.target.layers):
                return count
    return 1


def cache_bytes(opened: OpenedModels, config: EngineConfig, fit: Fit) -> int:
    """Bytes of the KV caches and states of all sequences, those of a draft excluded."""
    needs = fit_needs(opened, config, fit)
    hosted = needs.host.cache_bytes
    windows = 2 * opened.target.window_bytes(fit.context + tree_nodes(config)) if hosted else 0
    return needs.cache_bytes - windows + hosted


def no_room_for_substitute(opened: OpenedModels, config: EngineConfig) -> str:
    """In a clause, why a substitute was left out, and what to do about it."""
    bits = config.draft_bits or _SUBSTITUTE_BITS[-1]
    held: Held = "packed", bits
    needed = draft_bytes(held, opened.draft, config, config.context or _CONTEXTS[-1])
    needed += loading_bytes(held, opened.draft)
    given, option = (opened.memory, "`memory`") if opened.vram is None else (opened.vram, "`vram`")
    return (
        f"a {bits}-bit substitute of the target takes {format_bytes(needed)}, too much beside it in "
        f"{format_bytes(given)}: name a smaller model with `draft`, or give more {option}"
    )


def least_memory(opened: OpenedModels, config: EngineConfig) -> tuple[int, int | None]:
    """The smallest RAM, and the smallest device memory, with which the rest as given would still do."""
    memory = _needed(replace(opened, memory=1), config)
    return memory, None if opened.vram is None else _needed(replace(opened, vram=1), config)


def _needed(opened: OpenedModels, config: EngineConfig) -> int:
    try:
        find_fit(opened, config)
    except CapacityError as error:
        return error.needed
    return 0


def undrafted_nodes(opened: OpenedModels) -> int:
    """Nodes verified in a pass where nothing drafts: roots alone, or as many as lookups may fill."""
    config, roots = opened.config, opened.config.least_sequences
    if not set(LOOKUPS) & set(config.drafts):
        return roots
    if config.budget:
        return max(config.budget, roots)
    for nodes in (LOOKED_UP[opened.target.device.type], LEAST_BUDGET):
        budget = max(nodes, roots)
        if try_fit(opened, replace(config, budget=budget, width=config.width or 1)) is not None:
            return budget
    return roots


def _choices(opened: OpenedModels, config: EngineConfig) -> list[tuple[Held, int]]:
    """Ways to hold a draft and lengths of the context, the most wanted first.

    A conversation wants room: a context that would soon be full is taken only where no other fits.
    """
    lengths = _contexts(config, opened.target)
    choices = [(held, length) for held in _modes(opened, config) for length in lengths]
    if config.converses:
        longest = opened.target.skeleton.context_length
        choices.sort(key=lambda choice: choice[1] < min(_CONVERSATION, longest))
    return choices


def _contexts(config: EngineConfig, target: LoadedModel) -> list[int]:
    longest = target.skeleton.context_length
    if config.context is None:
        return [length for length in _CONTEXTS if length <= longest] or [longest]
    if config.context > longest:
        raise RequestError(f"a context of {config.context} is over the model's {longest}")
    return [config.context]


def _undrafted(opened: OpenedModels) -> Held:
    return ("head" if opened.heads else "none", UNROUNDED)


def _modes(opened: OpenedModels, config: EngineConfig) -> list[Held]:
    """Ways to hold a draft, the most wanted first: the fastest, then the one with the most bits.

    A product with packed weights is as fast as one with their values or faster, unless it unpacks them first.
    """
    alone = _undrafted(opened)
    if opened.draft is None:
        return [alone]
    if not config.substitutes and config.draft_bits in (None, UNROUNDED):
        return [("full", UNROUNDED)]
    widths = _SUBSTITUTE_BITS if config.draft_bits is None else (config.draft_bits,)
    held: list[Held] = [("packed", bits) for bits in widths]
    if unpacks(opened.draft, widths[0]):
        held.insert(0, ("expanded", widths[0]))
    return [*held, alone] if config.substitutes else held
