"""Drawing up a plan for opened models, from what was measured and what is known of the draft."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from offspec.core.config import AUTO, LOOKUPS, PLANNED, EngineConfig
from offspec.core.events import LoadProgress
from offspec.draft.lm import foreseeing
from offspec.draft.open import Notify
from offspec.model.contention import Contention
from offspec.model.loaded import LoadedModel
from offspec.model.parts import TargetParts
from offspec.plan.cpu_choice import choose_cpu_experts, choose_cpu_layers
from offspec.plan.fit import (
    LEAST_BUDGET,
    find_fit,
    fit_needs,
    keeps_unpacked,
    least_memory,
    undrafted_nodes,
)
from offspec.plan.load import Assembly
from offspec.plan.load_drafts import calibration_ids
from offspec.plan.measure_draft import measure_steps
from offspec.plan.measure_target import PassTrial, copy_rate, tried_machine
from offspec.plan.model_sizes import expert_sizes, sizes_of
from offspec.plan.needs import memory_parts
from offspec.plan.opened import OpenedModels
from offspec.plan.records import DraftRecord, ExpertRecord
from offspec.plan.variants import Variants
from offspec.stream.device_experts import DeviceExpertStore
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
    Outlook,
    best,
    budgets_for,
)
from offspec_planners.typical_acceptance import MODEL, SUBSTITUTE

_WALKED = 8.0  # nodes that a first estimate takes a pass to walk
_NO_DRAFT = "there is no draft"
_IN_THE_WAY = "The draft is left out: experts in its place are expected to bring more."
_SLOWER = (
    "The draft is left out, since it is not expected to make the model faster: {:.2g} tokens per second "
    "without it, {:.2g} with it. To draft anyway, set a budget."
)
# How much faster the model alone must be expected to be, by a measured acceptance rate and by a typical
# one: a draft that is left out is never measured.
_FASTER_ALONE = {True: 1.02, False: 1.3}
CONTENDED = (
    "other processes used the processors while this was measured, so it may be slower than the machine is: "
    "measure again when they are done, with `offspec plan --replan`"
)
# Share of a draft's seconds that growing on beside a pass saves where the link binds; see bench/LOG.md.
_HIDDEN = 0.3
_ENOUGH_TREES, _ENOUGH_PASSES = 8, 16  # to know a draft by


def measure(opened: OpenedModels, assembly: Assembly, config: EngineConfig, notify: Notify) -> MeasuredCosts:
    """Measure the loaded models; takes some seconds."""
    stage = "Measuring passes and draft steps"
    assert opened.codec is not None
    ids = calibration_ids(opened.codec, 512)
    capacity = assembly.context + (config.budget or 1)
    with closing(Contention()) as contention:
        trial = PassTrial(assembly.target, ids, capacity, config.temperature, contention.look)
        measured = trial.measure(lambda done, total: notify(LoadProgress(stage, done, total, "layers")))
        main = next(iter(assembly.sources.drafters.values()), None)
        if main is not None:
            parts, budget = TargetParts(assembly.target), config.budget or 1
            step, start = measure_steps(main, parts, ids, budget, config.temperature, contention.look)
            ahead = config.tree == "dynamic" and foreseeing(main) is not None
            measured = replace(measured, step=step, start=start, hidden=_HIDDEN if ahead else 0.0)
        if assembly.vram is not None:
            measured = replace(measured, host=measure_host(row_linear))
        if isinstance(assembly.target.store, DeviceExpertStore):
            measured = replace(measured, copy=copy_rate(assembly.target.store))
        measured = replace(measured, cpu_experts=assembly.placement.cpu_experts)
        if assembly.placement.caches is Tier.HOST:
            measured = replace(measured, prefix=assembly.context)
        return replace(measured, contended=contention.seen)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How often a draft's tokens are accepted, as far as a plan knows.

    Args:
        calibration: The counts.
        origin: Source of the counts, in words.
        measured: Whether the counts are of this draft.
    """

    calibration: Calibration
    origin: str
    measured: bool = False


def acceptance_for(record: DraftRecord, config: EngineConfig) -> Acceptance:
    """Acceptance of the draft at the planned temperature, as far as it is known."""
    coupled = config.verify == "coupled"
    found = record.find(config.temperature, coupled)
    if found is not None and _is_enough(found, config):
        return Acceptance(found, f"measured over {found.passes} passes", measured=True)
    near = record.nearest(config.temperature, coupled)
    if near is not None and _is_enough(near, config):
        return Acceptance(near, f"as measured over {near.passes} passes at another temperature")
    if record.kind == "substitute":
        return typical_substitute(record.bits)
    if record.kind == "head":
        return Acceptance(typical(record.typical), "typical of a small head, not measured")
    origin = f"typical of a small model of the same family{in_bits(record.bits)}, not measured"
    return Acceptance(typical(MODEL, bits=record.bits), origin)


def expert_record(target: LoadedModel, target_print: str, *, keeps: bool = True) -> ExpertRecord | None:
    """Record of a loaded target's experts; None if they are not loaded on demand."""
    sizes = expert_sizes(target) if target.store is not None else None
    return None if sizes is None else ExpertRecord(target_print, sizes, keeps=keeps)


def in_bits(bits: int) -> str:
    """Words for the bits of a rounded draft, after its name; "" if it is not rounded."""
    return "" if bits == 16 else f" in {bits} bits"


def typical_substitute(bits: int) -> Acceptance:
    """The acceptance to assume of a substitute before it has been measured."""
    bits = min(bits, 4)  # 16 where there is no draft, and nothing is made of this
    return Acceptance(typical(SUBSTITUTE, bits=bits), f"typical of a {bits}-bit substitute, not measured")


def _is_enough(known: Calibration, config: EngineConfig) -> bool:
    """Whether enough is known: a fixed shape needs counts by rank, a growing tree whole trees."""
    if config.tree == "sequoia":
        return known.passes >= _ENOUGH_PASSES
    return len(known.forest) >= _ENOUGH_TREES


def plan_by(opened: OpenedModels, loaded: EngineConfig, measured: MeasuredCosts, record: DraftRecord) -> Plan:
    """A plan by what was measured of loaded models and what is on record of the draft."""
    acceptance = acceptance_for(record, opened.config)
    known = expert_record(opened.target, opened.target_print)
    if known is not None:
        measured = replace(measured, use=known.use)
    hardware = tried_machine(opened.target, measured, sizes_of(opened.target, opened.config.model))
    plan = build_plan(opened, loaded, measured, acceptance, hardware)
    if not measured.contended:
        return plan
    return replace(plan, notes=(*plan.notes, f"{CONTENDED[0].upper()}{CONTENDED[1:]}."))


def build_plan(
    opened: OpenedModels, loaded: EngineConfig, pricing: Pricing, acceptance: Acceptance, hardware: Hardware
) -> Plan:
    """The fastest settings by these costs, with the draft in the bits that it has at the most nodes.

    A draft takes memory that layers or experts of the target could have, and time. It is left out if the
    model is expected to be faster without it, unless a budget was asked for.

    Args:
        opened: Models that memory is divided among.
        loaded: Settings with the most nodes there is room for.
        pricing: Costs of passes and draft steps.
        acceptance: Acceptance rates of the draft's tokens.
        hardware: For the record.

    Raises:
        CapacityError: Not even the least budget fits.
    """
    plan = _build(opened, loaded, pricing, acceptance, hardware)
    if not plan.drafts_with_model or opened.config.budget is not None:
        return plan
    alone = replace(opened, drafts=opened.drafts.without_model())
    without = _build(alone, loaded, pricing, acceptance, hardware)
    fast, slow = without.forecast.tok_per_s, plan.forecast.tok_per_s
    if plan.placement.by_need:
        stays = fast <= slow
    else:
        stays = plan.budget > plan.sequences and fast <= slow * _FASTER_ALONE[acceptance.measured]
    if stays:
        return plan
    why = _IN_THE_WAY if plan.placement.by_need else _SLOWER.format(fast, slow)
    return replace(without, draft_print=plan.draft_print, notes=(*without.notes, why))


def _build(
    opened: OpenedModels, loaded: EngineConfig, pricing: Pricing, acceptance: Acceptance, hardware: Hardware
) -> Plan:
    """Plan with the draft held as it is at the most nodes."""
    calibration = acceptance.calibration
    held, draft_print = find_fit(opened, loaded), opened.drafts.fingerprint
    if not held.drafts_with_model:  # there was no room for a model, and so it was not tried
        opened = replace(opened, drafts=opened.drafts.without_model())
    else:
        loaded = replace(loaded, draft_bits=held.draft_bits)
        opened = replace(opened, config=replace(opened.config, draft_bits=held.draft_bits))
    wanted, sequences = opened.config, opened.config.least_sequences
    drafts = bool(opened.drafts.names)
    target = sizes_of(opened.target, wanted.model)
    predictor = Predictor(target, pricing, calibration, sequences, wanted.tree, drafts)
    most = largest = loaded.budget or 1
    if acceptance.measured and calibration.forest:  # of larger trees than were recorded nothing is known
        largest = max(len(tree.parent) for tree in calibration.forest)
        most = min(most, sequences * largest)
    budgets = [max(wanted.budget, sequences)] if wanted.budget else budgets_for(sequences, most)
    widths = [wanted.width] if wanted.width else [width for width in WIDTHS if width <= (loaded.width or 1)]
    if not drafts:
        budgets, widths = [sequences], [1]
    settled, found = _settle(opened, loaded, predictor, budgets, widths)
    fit, chosen = find_fit(opened, settled), best(found)
    unpacked = keeps_unpacked(opened, settled, fit)
    if unpacked:
        predictor = replace(predictor, target=target.unpacked_once())
    costs = predictor.costs(fit.placement, chosen.choice.tokens_per_pass)
    chosen = predictor.refined(costs, chosen)
    least = replace(settled, budget=max(LEAST_BUDGET, sequences), width=loaded.width)
    least_ram, least_vram = least_memory(opened, least)
    variants = Variants(opened, settled, fit, predictor, chosen)
    shared = variants.shared_passes((loaded.budget or 1, largest))
    return Plan(
        target=wanted.model,
        target_print=opened.target_print,
        draft=opened.asked,
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


def _settle(
    opened: OpenedModels,
    loaded: EngineConfig,
    predictor: Predictor,
    budgets: Sequence[int],
    widths: Sequence[int],
) -> tuple[EngineConfig, list[Outlook]]:
    """(Settings with the best budget, width and work for the CPU, outlooks of all budgets and widths)."""
    wanted, settled, walked, found = opened.config, loaded, _WALKED, list[Outlook]()
    for _ in range(2):  # the best budget leaves other room for layers than the most, and walks another path
        found = predictor.sweep(predictor.costs(find_fit(opened, settled).placement, walked), budgets, widths)
        chosen = best(found)
        choice, walked = chosen.choice, chosen.choice.tokens_per_pass
        nodes = choice.budget if predictor.drafts else undrafted_nodes(opened)
        settled = replace(wanted, budget=nodes, width=choice.width)
        if wanted.chooses_cpu_layers:
            layers = choose_cpu_layers(opened, settled, predictor, chosen)
            settled = replace(settled, cpu_layers=layers)
        if wanted.chooses_experts:
            pays = choose_cpu_experts(opened, settled, predictor, chosen)
            settled = replace(settled, experts="cpu" if pays else "gpu")
    return settled, found


def notes_on(opened: OpenedModels) -> tuple[str, ...]:
    """Effects that a plan does not predict."""
    lookups, notes = [name for name in opened.config.drafts if name in LOOKUPS], list[str]()
    if opened.asked == AUTO and opened.drafts.names:
        names = " with ".join(opened.config.drafts)
        notes.append(f'`draft="auto"` selects {names}, for this plan and for a run.')
    if lookups:
        copy = "copy" if len(lookups) > 1 else "copies"
        notes.append(
            f"What {' and '.join(lookups)} {copy} from the text comes on top, and depends on the text."
        )
    if opened.more_vram:
        notes.append(
            "Each GPU is taken to have such a link of its own: many desktop boards divide one among two."
        )
    return tuple(notes)
