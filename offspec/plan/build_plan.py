"""Building a plan for opened models, from measured costs and the draft's acceptance rate."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from offspec.core.config import AUTO, LOOKUPS, PLANNED, EngineConfig
from offspec.core.events import LoadProgress
from offspec.draft.lm import ahead_drafter
from offspec.draft.open import Notify
from offspec.model.cpu_contention import CpuContention
from offspec.model.loaded import LoadedModel
from offspec.model.parts import TargetParts
from offspec.plan.cpu_offload import choose_cpu_experts, choose_cpu_layers
from offspec.plan.fit import (
    LEAST_BUDGET,
    find_fit,
    fit_needs,
    fits_unpacked,
    min_memory,
    nodes_without_draft,
)
from offspec.plan.load import Assembly
from offspec.plan.load_drafts import calibration_ids
from offspec.plan.measure_draft import measure_steps
from offspec.plan.measure_target import PassBenchmark, copy_rate, measured_hardware
from offspec.plan.model_sizes import expert_sizes, sizes_of
from offspec.plan.needs import memory_parts
from offspec.plan.opened import OpenedModels
from offspec.plan.records import DraftRecord, ExpertRecord
from offspec.plan.variants import Variants
from offspec.stream.device_expert_store import DeviceExpertStore
from offspec_kernels.row_linear import row_linear
from offspec_planners.acceptance import Calibration, typical
from offspec_planners.cost import Pricing
from offspec_planners.hardware_rates import Hardware
from offspec_planners.measure import measure_host
from offspec_planners.measured_costs import MeasuredCosts
from offspec_planners.placement import Tier
from offspec_planners.plan import Plan
from offspec_planners.predictor import Predictor
from offspec_planners.search import (
    WIDTHS,
    SpeedForecast,
    best,
    budgets_for,
)
from offspec_planners.typical_acceptance import MODEL, SELF_DRAFT

_WALKED = 8.0  # nodes that a pass is first assumed to walk
_NO_DRAFT = "there is no draft"
_IN_THE_WAY = "The draft is left out: using its memory to cache experts is expected to be faster."
_SLOWER = (
    "The draft is left out, since it is not expected to make the model faster: {:.2g} tokens per second "
    "without it, {:.2g} with it. To draft anyway, set a budget."
)
# Minimum speedup of the model alone, by a measured acceptance rate and by a typical
# one: a draft that is left out is never measured.
_FASTER_ALONE = {True: 1.02, False: 1.3}
CONTENDED = (
    "other processes used the CPU during the measurement, so the predicted speed may be too low: measure "
    "again on an idle machine with `offspec plan --replan`"
)
# Share of drafting time saved by drafting during a transfer-bound pass; see bench/LOG.md.
_HIDDEN = 0.3
_ENOUGH_TREES, _ENOUGH_PASSES = 8, 16  # minimum to know a draft by


def measure(opened: OpenedModels, assembly: Assembly, config: EngineConfig, notify: Notify) -> MeasuredCosts:
    """Measure the loaded models; takes some seconds."""
    stage = "Measuring passes and draft steps"
    assert opened.codec is not None
    ids = calibration_ids(opened.codec, 512)
    capacity = assembly.context + (config.budget or 1)
    with closing(CpuContention()) as contention:
        trial = PassBenchmark(assembly.target, ids, capacity, config.temperature, contention.poll)
        measured = trial.measure(lambda done, total: notify(LoadProgress(stage, done, total, "layers")))
        main = next(iter(assembly.sources.drafters.values()), None)
        if main is not None:
            parts, budget = TargetParts(assembly.target), config.budget or 1
            step, start = measure_steps(main, parts, ids, budget, config.temperature, contention.poll)
            ahead = config.tree == "dynamic" and ahead_drafter(main) is not None
            measured = replace(measured, step=step, start=start, hidden=_HIDDEN if ahead else 0.0)
        if assembly.vram is not None:
            measured = replace(measured, host=measure_host(row_linear))
        if isinstance(assembly.target.store, DeviceExpertStore):
            measured = replace(measured, copy=copy_rate(assembly.target.store))
        measured = replace(measured, cpu_experts=assembly.placement.cpu_experts)
        if assembly.placement.caches is Tier.HOST:
            measured = replace(measured, prefix=assembly.context)
        return replace(measured, contended=contention.was_busy)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance rate of a draft's tokens, as far as it is known to a plan.

    Args:
        calibration: The counts.
        origin: Source of the counts, in words.
        measured: Whether the counts are of this draft.
    """

    calibration: Calibration
    origin: str
    measured: bool = False


def acceptance_for(record: DraftRecord, config: EngineConfig) -> Acceptance:
    """Return the draft's acceptance at the planned temperature, measured or typical."""
    coupled = config.verify == "coupled"
    found = record.find(config.temperature, coupled)
    if found is not None and _is_enough(found, config):
        return Acceptance(found, f"measured over {found.passes} passes", measured=True)
    near = record.nearest(config.temperature, coupled)
    if near is not None and _is_enough(near, config):
        return Acceptance(near, f"as measured over {near.passes} passes at another temperature")
    if record.kind == "self-draft":
        return typical_self_draft(record.bits)
    if record.kind == "head":
        return Acceptance(typical(record.typical), "typical of a small head, not measured")
    origin = f"typical of a small model of the same family{bits_suffix(record.bits)}, not measured"
    return Acceptance(typical(MODEL, bits=record.bits), origin)


def expert_record(target: LoadedModel, target_print: str, *, keeps: bool = True) -> ExpertRecord | None:
    """Return the record of a loaded target's experts; None if they are not loaded on demand."""
    sizes = expert_sizes(target) if target.store is not None else None
    return None if sizes is None else ExpertRecord(target_print, sizes, keeps=keeps)


def bits_suffix(bits: int) -> str:
    """Return a suffix with the bits of a quantized draft, for its name; "" if it is not quantized."""
    return "" if bits == 16 else f" in {bits} bits"


def typical_self_draft(bits: int) -> Acceptance:
    """Return the acceptance to assume of a self-draft before it has been measured."""
    bits = min(bits, 4)  # 16 means no draft, and the result is not used
    return Acceptance(typical(SELF_DRAFT, bits=bits), f"typical of a {bits}-bit self-draft, not measured")


def _is_enough(known: Calibration, config: EngineConfig) -> bool:
    """Return whether enough is known: a fixed shape needs counts by rank, a growing tree whole trees."""
    if config.tree == "sequoia":
        return known.passes >= _ENOUGH_PASSES
    return len(known.forest) >= _ENOUGH_TREES


def plan_from_measurements(
    opened: OpenedModels, loaded: EngineConfig, measured: MeasuredCosts, record: DraftRecord
) -> Plan:
    """Build a plan from measurements of loaded models and the record of the draft."""
    acceptance = acceptance_for(record, opened.config)
    known = expert_record(opened.target, opened.target_fingerprint)
    if known is not None:
        measured = replace(measured, use=known.use)
    hardware = measured_hardware(opened.target, measured, sizes_of(opened.target, opened.config.model))
    plan = build_plan(opened, loaded, measured, acceptance, hardware)
    if not measured.contended:
        return plan
    return replace(plan, notes=(*plan.notes, f"{CONTENDED[0].upper()}{CONTENDED[1:]}."))


def build_plan(
    opened: OpenedModels, loaded: EngineConfig, pricing: Pricing, acceptance: Acceptance, hardware: Hardware
) -> Plan:
    """Build the plan with the fastest settings by these costs, with the draft's bits at the largest budget.

    A draft takes time, and memory that layers or experts of the target could use. It is left out if the model
    is expected to be faster without it, unless a budget was set.

    Args:
        opened: Models that memory is divided among.
        loaded: Settings with the largest budget that fits.
        pricing: Costs of passes and draft steps.
        acceptance: Acceptance rates of the draft's tokens.
        hardware: Profile to record.

    Raises:
        CapacityError: Not even the smallest budget fits.
    """
    plan = _build(opened, loaded, pricing, acceptance, hardware)
    if not plan.drafts_with_model or opened.config.budget is not None:
        return plan
    alone = replace(opened, drafts=opened.drafts.without_model())
    without = _build(alone, loaded, pricing, acceptance, hardware)
    fast, slow = without.forecast.tok_per_s, plan.forecast.tok_per_s
    if plan.placement.on_demand_experts:
        stays = fast <= slow
    else:
        stays = plan.budget > plan.sequences and fast <= slow * _FASTER_ALONE[acceptance.measured]
    if stays:
        return plan
    why = _IN_THE_WAY if plan.placement.on_demand_experts else _SLOWER.format(fast, slow)
    return replace(without, draft_print=plan.draft_print, notes=(*without.notes, why))


def _build(
    opened: OpenedModels, loaded: EngineConfig, pricing: Pricing, acceptance: Acceptance, hardware: Hardware
) -> Plan:
    """Build a plan with the draft stored as at the largest budget."""
    calibration = acceptance.calibration
    held, draft_print = find_fit(opened, loaded), opened.drafts.fingerprint
    if not held.drafts_with_model:  # there was no room for a model, so it was not tried
        opened = replace(opened, drafts=opened.drafts.without_model())
    else:
        loaded = replace(loaded, draft_bits=held.draft_bits)
        opened = replace(opened, config=replace(opened.config, draft_bits=held.draft_bits))
    wanted, sequences = opened.config, opened.config.min_sequences
    drafts = bool(opened.drafts.names)
    target = sizes_of(opened.target, wanted.model)
    predictor = Predictor(target, pricing, calibration, sequences, wanted.tree, drafts)
    most = largest = loaded.budget or 1
    if acceptance.measured and calibration.forest:  # nothing is known of trees larger than the recorded ones
        largest = max(len(tree.parent) for tree in calibration.forest)
        most = min(most, sequences * largest)
    budgets = [max(wanted.budget, sequences)] if wanted.budget else budgets_for(sequences, most)
    widths = [wanted.width] if wanted.width else [width for width in WIDTHS if width <= (loaded.width or 1)]
    if not drafts:
        budgets, widths = [sequences], [1]
    settled, found = _choose_settings(opened, loaded, predictor, budgets, widths)
    fit, chosen = find_fit(opened, settled), best(found)
    unpacked = fits_unpacked(opened, settled, fit)
    if unpacked:
        predictor = replace(predictor, target=target.unpacked_once())
    costs = predictor.costs(fit.placement, chosen.choice.tokens_per_pass)
    chosen = predictor.refined(costs, chosen)
    least = replace(settled, budget=max(LEAST_BUDGET, sequences), width=loaded.width)
    least_ram, least_vram = min_memory(opened, least)
    variants = Variants(opened, settled, fit, predictor, chosen)
    shared = variants.shared_passes((loaded.budget or 1, largest))
    return Plan(
        target=wanted.model,
        target_print=opened.target_fingerprint,
        draft=opened.draft_option,
        draft_print=draft_print,
        hardware=hardware,
        device=wanted.device,
        memory=opened.memory,
        vram=opened.vram,
        more_vram=opened.more_vram,
        context=fit.context,
        temperature=wanted.temperature,
        draft_mode=fit.draft_mode,
        draft_bits=fit.draft_bits,
        chunk=fit.chunk,
        parts=memory_parts(opened, fit_needs(opened, settled, fit), fit.placement, unpacked=unpacked),
        placement=fit.placement,
        budget=settled.budget or 1,
        width=chosen.choice.width,
        depth=round(chosen.depth),
        costs=costs if sequences > 1 else replace(costs, caches=0.0),  # they are in `link`
        forecast=predictor.forecast(chosen, costs, hardware),
        sweep=tuple(row.choice for row in found),
        what_ifs=variants.what_ifs(shared),
        acceptance=acceptance.origin if drafts else _NO_DRAFT,
        measured=acceptance.measured,
        least_memory=least_ram,
        least_vram=least_vram,
        notes=notes_on(opened),
        sequences=sequences,
        shared=shared,
        **{name: getattr(wanted, name) for name in PLANNED},
    )


def _choose_settings(
    opened: OpenedModels,
    loaded: EngineConfig,
    predictor: Predictor,
    budgets: Sequence[int],
    widths: Sequence[int],
) -> tuple[EngineConfig, list[SpeedForecast]]:
    """Return (settings with the best budget, width and CPU work, forecasts of all budgets and widths)."""
    wanted, settled, walked, found = opened.config, loaded, _WALKED, list[SpeedForecast]()
    for _ in range(
        2
    ):  # the best budget leaves other room for layers than the largest, and walks another path
        found = predictor.sweep(predictor.costs(find_fit(opened, settled).placement, walked), budgets, widths)
        chosen = best(found)
        choice, walked = chosen.choice, chosen.choice.tokens_per_pass
        nodes = choice.budget if predictor.drafts else nodes_without_draft(opened)
        settled = replace(wanted, budget=nodes, width=choice.width)
        if wanted.plans_cpu_layers:
            layers = choose_cpu_layers(opened, settled, predictor, chosen)
            settled = replace(settled, cpu_layers=layers)
        if wanted.plans_cpu_experts:
            pays = choose_cpu_experts(opened, settled, predictor, chosen)
            settled = replace(settled, experts="cpu" if pays else "gpu")
    return settled, found


def notes_on(opened: OpenedModels) -> tuple[str, ...]:
    """Return notes on effects that a plan does not predict."""
    lookups, notes = [name for name in opened.config.drafts if name in LOOKUPS], list[str]()
    if opened.draft_option == AUTO and opened.drafts.names:
        names = " with ".join(opened.config.drafts)
        notes.append(f'`draft="auto"` selects {names}, for this plan and for a run.')
    if lookups:
        copy = "copy" if len(lookups) > 1 else "copies"
        notes.append(
            f"Tokens that {' and '.join(lookups)} {copy} from the text are not included: they depend on it."
        )
    if opened.more_vram:
        notes.append("Each GPU is assumed to have its own link; many desktop boards share one between two.")
    return tuple(notes)
