"""Fit of opened models in memory: context length, storage of the draft, and the tier of each layer."""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import cast

from offspec.core.config import LOOKUPS, DraftBits, EngineConfig
from offspec.core.errors import CapacityError, RequestError
from offspec.model.loaded import LoadedModel
from offspec.model.runner import CHUNK, SMALL_CHUNK
from offspec.plan.needs import (
    DraftMode,
    DraftStorage,
    draft_bytes,
    loading_bytes,
    memory_needs,
    tree_nodes,
    unpacks_weights,
)
from offspec.plan.opened import OpenedModels
from offspec_planners.memory_division import CPU_LAYERS, MemoryNeeds, divide, placement_fits
from offspec_planners.placement import Placement, Tier, TooSmallError, cpu_layers
from offspec_planners.plan import MODEL_MODES, Plan
from offspec_planners.units import format_bytes

UNQUANTIZED: DraftBits = 16
LEAST_BUDGET = 16  # nodes that there must be room for with a draft
LOOKUP_BUDGETS = {
    "cpu": 64,
    "cuda": 128,
}  # nodes with lookups alone, which take no time to draft

_SELF_DRAFT_BITS: tuple[DraftBits, ...] = (4, 3, 2)  # tried in this order by default
_SEQUENCES = (8, 4, 2)  # tried in this order by default
_DISPLACED = 0.05  # share of layers that sequences may displace: most of a pass is transfer
_CONTEXTS = (4096, 2048, 1024, 512)  # tried in this order by default
_CONVERSATION = 2048  # tokens of some turns of a conversation


@dataclass(frozen=True, slots=True)
class Fit:
    """A division of memory.

    Args:
        context: Tokens of prompt and answer together.
        draft_mode: Storage of the draft.
        placement: Tier of each layer and of the head.
        chunk: Rows of a prompt that run together.
        draft_bits: Bits of the draft's matrices; 16 if they are not quantized or there is no draft.
    """

    context: int
    draft_mode: DraftMode
    placement: Placement
    chunk: int = CHUNK
    draft_bits: DraftBits = UNQUANTIZED

    @classmethod
    def of_plan(cls, plan: Plan) -> "Fit":
        """Return the division of memory that a plan records."""
        mode, bits = cast(DraftMode, plan.draft_mode), cast(DraftBits, plan.draft_bits)
        return cls(plan.context, mode, plan.placement, plan.chunk, bits)

    @property
    def draft_storage(self) -> DraftStorage:
        """Draft mode and bits."""
        return self.draft_mode, self.draft_bits

    @property
    def drafts_with_model(self) -> bool:
        """Whether memory is reserved for a draft model."""
        return self.draft_mode in MODEL_MODES


def find_fit(
    opened: OpenedModels,
    config: EngineConfig,
    share: float = 1.0,
    *,
    draft_storage: DraftStorage | None = None,
) -> Fit:
    """Find the first arrangement that fits: the best draft, then the longest context; see `_fit_candidates`.

    Args:
        opened: Models that memory is divided among.
        config: Settings with the largest budget and width that will be used.
        share: Assumed size of each layer relative to its actual size.
        draft_storage: Storage of the draft, overriding the settings. None: by the settings.

    Raises:
        CapacityError: Nothing fits.
        RequestError: The context is longer than the model's.
    """
    try:
        return _first_fit(opened, config, share, draft_storage)
    except TooSmallError as error:
        shorter = config.context is not None and config.context > _CONTEXTS[-1]
        fits = shorter and try_fit(
            opened, replace(config, context=_CONTEXTS[-1]), share, draft_storage=draft_storage
        )
        raise _capacity_error(error, shorter_context=bool(fits)) from None


def try_fit(
    opened: OpenedModels,
    config: EngineConfig,
    share: float = 1.0,
    *,
    draft_storage: DraftStorage | None = None,
) -> Fit | None:
    """Return `find_fit`, or None if nothing fits."""
    with suppress(TooSmallError):
        return _first_fit(opened, config, share, draft_storage)
    return None


def _first_fit(
    opened: OpenedModels, config: EngineConfig, share: float, draft_storage: DraftStorage | None
) -> Fit:
    """Return the first arrangement that fits. Raises RequestError, and TooSmallError if nothing fits."""
    failures = list[TooSmallError]()
    for way, context in _fit_candidates(opened, config):
        for caches in _cache_tiers(opened, config):
            try:
                return _fit_with(opened, config, draft_storage or way, context, caches, share)
            except TooSmallError as error:
                failures.append(error)
    # A part that does not fit in RAM may fit on the device.
    raise min(failures, key=lambda error: (error.where is Tier.DEVICE, error.needed))


def _cache_tiers(opened: OpenedModels, config: EngineConfig) -> tuple[Tier, ...]:
    """Return the tiers that the target's KV cache may be in; RAM only for a context that was set
    explicitly.
    """
    one = opened.vram is not None and not opened.more_vram and not config.cpu_layers  # computes all layers
    one = one and config.min_sequences == 1  # the windows belong to it
    moves = one and config.context is not None and opened.target.can_offload_cache
    return (Tier.DEVICE, Tier.HOST) if moves else (Tier.DEVICE,)


def _fit_with(
    opened: OpenedModels, config: EngineConfig, held: DraftStorage, context: int, caches: Tier, share: float
) -> Fit:
    """Fit with this storage of the draft and this tier of the KV cache. Raises TooSmallError."""
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
        # If not even one layer stays, a smaller chunk may make room for one, a slot or the head.
        if found is None or placement != found.placement:
            found = Fit(context, held[0], placement, chunk, held[1])
        if found.placement.resident:
            break
    if found is None:
        raise min(failures, key=lambda error: error.needed)
    return found


def _capacity_error(error: TooSmallError, *, shorter_context: bool) -> CapacityError:
    """Return the error for a memory limit that is too small, with the minimum, the remedy and the parts.

    shorter_context: whether a shorter context would fit.
    """
    kind, option = ("device memory", "vram") if error.where is Tier.DEVICE else ("memory", "memory")
    listing = ", ".join(f"{name} {format_bytes(size)}" for name, size in error.parts.items() if size)
    remedies = [f"give more `{option}`"]
    if shorter_context:
        remedies.append("use a shorter `context`")
    if error.parts[CPU_LAYERS]:
        remedies.append("use fewer `cpu_layers`")
    return CapacityError(
        f"{format_bytes(error.given)} of {kind} is too little: the minimum is "
        f"{format_bytes(-(-error.needed // 10**7) * 10**7)}; {' or '.join(remedies)} ({listing})",
        needed=error.needed,
        given=error.given,
    )


def still_fits(opened: OpenedModels, config: EngineConfig, fit: Fit) -> bool:
    """Return whether an earlier arrangement still fits."""
    modes = [*_modes(opened, config), _no_draft_storage(opened)]  # a plan may leave the draft out
    if len(fit.placement.tiers) != len(opened.target.layers) or fit.draft_storage not in modes:
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


def fit_needs(opened: OpenedModels, config: EngineConfig, fit: Fit) -> MemoryNeeds:
    """Return the memory needs under an arrangement."""
    placed, cpu = fit.placement, fit.placement.layers(Tier.CPU)
    return memory_needs(opened, config, fit.draft_storage, fit.context, fit.chunk, placed.caches, cpu)


def fits_unpacked(opened: OpenedModels, config: EngineConfig, fit: Fit) -> bool:
    """Return whether a packed target fits unpacked at load, with all of it resident.

    Its passes then skip unpacking, which is the best use of that memory.
    """
    target = opened.target
    stays = len(fit.placement.resident) == len(target.layers) and fit.placement.head is Tier.DEVICE
    stays = stays and not fit.placement.on_demand_experts
    if not target.is_packed or not stays:
        return False
    needs = fit_needs(opened, config, fit)
    needs = replace(
        needs, layer_bytes=target.unpacked_layer_bytes, extra_bytes=target.unpacked_conversion_bytes
    )
    return placement_fits(opened.memory, needs, fit.placement, opened.vram)


def max_sequences(opened: OpenedModels, config: EngineConfig) -> int:
    """Return the number of sequences that fit with the same draft and context, at the cost of hardly a
    layer.
    """
    wanted = replace(config, budget=config.budget or LEAST_BUDGET)
    alone = find_fit(opened, replace(wanted, sequences=1))
    for count in _SEQUENCES:
        fit = try_fit(opened, replace(wanted, sequences=count))
        if fit is not None and (fit.context, fit.draft_storage) == (alone.context, alone.draft_storage):
            lost = len(alone.placement.resident) - len(fit.placement.resident)
            if lost <= _DISPLACED * len(opened.target.layers):
                return count
    return 1


def cache_bytes(opened: OpenedModels, config: EngineConfig, fit: Fit) -> int:
    """Return the bytes of the KV caches and states of all sequences, without those of a draft."""
    needs = fit_needs(opened, config, fit)
    hosted = needs.host.cache_bytes
    windows = 2 * opened.target.offload_buffer_bytes(fit.context + tree_nodes(config)) if hosted else 0
    return needs.cache_bytes - windows + hosted


def self_draft_does_not_fit(opened: OpenedModels, config: EngineConfig) -> str:
    """Return a clause why the self-draft was left out, and what to do about it."""
    bits = config.draft_bits or _SELF_DRAFT_BITS[-1]
    held: DraftStorage = "packed", bits
    needed = draft_bytes(held, opened.draft, config, config.context or _CONTEXTS[-1])
    needed += loading_bytes(held, opened.draft)
    given, option = (opened.memory, "`memory`") if opened.vram is None else (opened.vram, "`vram`")
    return (
        f"a {bits}-bit self-draft takes {format_bytes(needed)}, which does not fit with the target in "
        f"{format_bytes(given)}: name a smaller model with `draft`, or give more {option}"
    )


def min_memory(opened: OpenedModels, config: EngineConfig) -> tuple[int, int | None]:
    """Return the minimum RAM, and the minimum device memory, that suffice with the other limit as given."""
    memory = _needed(replace(opened, memory=1), config)
    return memory, None if opened.vram is None else _needed(replace(opened, vram=1), config)


def _needed(opened: OpenedModels, config: EngineConfig) -> int:
    try:
        find_fit(opened, config)
    except CapacityError as error:
        return error.needed
    return 0


def nodes_without_draft(opened: OpenedModels) -> int:
    """Return the nodes verified per pass without a drafter: roots alone, or as many as lookups may add."""
    config, roots = opened.config, opened.config.min_sequences
    if not set(LOOKUPS) & set(config.drafts):
        return roots
    if config.budget:
        return max(config.budget, roots)
    for nodes in (LOOKUP_BUDGETS[opened.target.device.type], LEAST_BUDGET):
        budget = max(nodes, roots)
        if try_fit(opened, replace(config, budget=budget, width=config.width or 1)) is not None:
            return budget
    return roots


def _fit_candidates(opened: OpenedModels, config: EngineConfig) -> list[tuple[DraftStorage, int]]:
    """Return combinations of draft storage and context length, in order of preference.

    A conversation needs a long context: one that would soon be full is a last resort.
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
        raise RequestError(f"a context of {config.context} exceeds the model's limit of {longest} tokens")
    return [config.context]


def _no_draft_storage(opened: OpenedModels) -> DraftStorage:
    return ("head" if opened.heads else "none", UNQUANTIZED)


def _modes(opened: OpenedModels, config: EngineConfig) -> list[DraftStorage]:
    """Return storages of the draft in order of preference: the fastest, then the one with the most bits.

    A product with packed weights is as fast as one with their values or faster, unless it unpacks them first.
    """
    alone = _no_draft_storage(opened)
    if opened.draft is None:
        return [alone]
    if not config.uses_self_draft and config.draft_bits in (None, UNQUANTIZED):
        return [("full", UNQUANTIZED)]
    widths = _SELF_DRAFT_BITS if config.draft_bits is None else (config.draft_bits,)
    held: list[DraftStorage] = [("packed", bits) for bits in widths]
    if unpacks_weights(opened.draft, widths[0]):
        held.insert(0, ("expanded", widths[0]))
    return [*held, alone] if config.uses_self_draft else held
