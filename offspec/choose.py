"""How trees are to be grown and what goes where: from a plan that an earlier run left, or a new one.

A budget can only be chosen when it is known what passes and draft steps take, and that only when the models
are loaded, for which a budget must be known. So the first load takes room for an allowance, and what is
measured then makes the plan: this run grows its trees by it, and the next one is laid out by it as well.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, cast

from offspec import ledger
from offspec.assemble import Assembly, Opened, calibration_ids, load_models, open_models
from offspec.config import Dtype, EngineConfig, Tree, format_bytes
from offspec.errors import PlanError
from offspec.events import Event, LoadProgress, Notice
from offspec.fit import WIDEST, DraftMode, Fit
from offspec.grow import GrowthPolicy
from offspec.ledger import DraftRecord
from offspec.machine import kept_machine, machine_print
from offspec.outline import sizes_of
from offspec.timeline import OFF, Timeline
from offspec.trial import PassTrial, measure_steps, tried_machine
from offspec.whatif import WhatIfs
from offspec_planners.calibrate import Calibration, typical
from offspec_planners.cost import ModelSizes, PassCosts, Pricing, prefill_seconds
from offspec_planners.hardware import Hardware
from offspec_planners.measured import Measured
from offspec_planners.plan import Forecast, Plan
from offspec_planners.search import BUDGETS, WIDTHS, Outlook, best, outlook, sweep
from offspec_planners.sequoia import Shape, choose_shape

Notify = Callable[[Event], None]

_ALLOWANCES = {"cpu": (512, 256, 128), "cuda": (1024, 512, 256)}  # nodes to make room for, before it is known
_MEASURED = "measured"  # how a plan begins to say where its acceptance comes from, if it was
_WALKED = 8.0  # nodes that a first estimate takes a pass to walk
_PROMPT = 512  # tokens of the prompt that the time to a first token is told for
_ENOUGH_TREES, _WHOLE_FOREST = 8, 24  # recorded, to know a draft by; and to know it well
_MORE = 1.25  # a plan is remade where so much more memory is free than when it was made


@dataclass(frozen=True, slots=True)
class Way:
    """How an engine grows its trees. shape: of every tree, where it is fixed; plan: what it comes from.

    record: most nodes to grow on to, for later plans, as long as few trees are on record.
    """

    policy: GrowthPolicy
    shape: Shape | None = None
    plan: Plan | None = None
    record: int = 0

    @classmethod
    def fixed(cls, config: EngineConfig) -> "Way":
        """As the configuration says, with nothing planned."""
        return cls(GrowthPolicy(config.budget or 1, config.width or WIDEST))

    def recording(self, calibration: Calibration) -> GrowthPolicy:
        """The policy, which grows more than it verifies while little is on record."""
        if self.record <= self.policy.budget or len(calibration.forest) >= _WHOLE_FOREST:
            return self.policy
        return replace(self.policy, record=self.record)


@dataclass(frozen=True, slots=True)
class Ready:
    """Everything an engine is made of. config: with the budget and width that there is room for.

    record: what is known of the draft, whether or not it is kept; measured: where it had to be.
    """

    config: EngineConfig
    assembly: Assembly
    way: Way
    record: DraftRecord
    opened: Opened
    measured: Measured | None = None


@dataclass(frozen=True, slots=True)
class Outset:
    """How to load: settings with budget and width filled in, and what goes where.

    plan: the one that is followed; plans: whether there is one, or is to be one.
    """

    config: EngineConfig
    fit: Fit
    plan: Plan | None = None
    plans: bool = True


def prepare(
    config: EngineConfig,
    notify: Notify,
    timeline: Timeline = OFF,
    *,
    named: Plan | None = None,
    replan: bool = False,
) -> Ready:
    """Open, decide and load. named: a plan to follow; replan: measure, whatever is kept or given.

    Raises any OffspecError; on an error nothing stays open.
    """
    if named is not None:
        config = _as_planned(config, named)
    opened = open_models(config, notify, timeline)
    try:
        record = DraftRecord(opened.target_print, opened.draft_print)
        key = plan_key(opened)
        kept = None if replan else _up_to_date(ledger.kept_plan(key), record, config, notify)
        start = outset(opened, named, kept, notify)
    except BaseException:
        opened.close()
        raise
    assembly = load_models(opened, start.config, start.fit, notify)
    if not start.plans and not replan:
        return Ready(start.config, assembly, Way.fixed(start.config), record, opened)
    plan, measured = start.plan, None
    if plan is None:
        try:
            measured = measure(opened, assembly, start.config, notify)
            plan = plan_by(opened, start.config, measured, record)
        except BaseException:
            opened.close()
            raise
        ledger.keep_plan(key, plan)
    return Ready(start.config, assembly, way_of(plan, start.config, record), record, opened, measured)


def _up_to_date(kept: Plan | None, record: DraftRecord, config: EngineConfig, notify: Notify) -> Plan | None:
    """The kept plan, unless it was made before anything was known of the draft, and now something is."""
    if kept is None or is_measured(kept):
        return kept
    if not calibration_for(record, config)[1].startswith(_MEASURED):
        return kept
    notify(Notice("the plan is remade: how well the draft guesses is known by now"))
    return None


def is_measured(plan: Plan) -> bool:
    """Whether the plan knows how well the draft guesses, or only how such drafts do."""
    return plan.acceptance.startswith(_MEASURED)


def plan_by(opened: Opened, loaded: EngineConfig, measured: Measured, record: DraftRecord) -> Plan:
    """A plan by what was measured of loaded models and what is on record of the draft."""
    calibration, origin = calibration_for(record, opened.config)
    hardware = kept_machine(opened.config.device)
    if hardware is None:
        hardware = tried_machine(opened.target, measured, sizes_of(opened.target, opened.config.model))
    return make_plan(opened, loaded, measured, calibration, origin, hardware)


def _as_planned(config: EngineConfig, plan: Plan) -> EngineConfig:
    """The plan's own settings, where the caller did not say otherwise."""
    rounded = plan.draft not in ("auto", "none") and plan.draft_mode != "full"
    return replace(
        config,
        draft=plan.draft if config.draft == "auto" else config.draft,
        draft_bits=4 if rounded else config.draft_bits,
        memory=config.memory or plan.memory,
        vram=config.vram or plan.vram,
        context=config.context or plan.context,
        device=plan.device,
        dtype=cast(Dtype, plan.dtype),
        tree=cast(Tree, plan.tree),
        temperature=plan.temperature,
    )


def outset(opened: Opened, named: Plan | None, kept: Plan | None, notify: Notify) -> Outset:
    """How to load what was opened: as the plan says that the user named or an earlier run left.

    Without one, or where both budget and width are given, as the configuration says; a budget that is not
    given becomes an allowance. A plan that no longer fits is left out, with a notice. Raises PlanError for a
    named plan of other models, CapacityError, RequestError.
    """
    config = opened.config
    if named is not None:
        _belongs(named, opened)
    elif opened.draft is None or (config.budget and config.width):
        alone = config if opened.draft is not None else replace(config, budget=1, width=1)
        return Outset(alone, opened.fit(alone), plans=False)
    plan = named or kept
    if plan is not None:
        found = _still_fits(plan, opened)
        if isinstance(found, Outset):
            return found
        notify(Notice(f"the plan is remade: {found}"))
    allowed = _allowance(opened)
    return Outset(allowed, opened.fit(allowed))


def _belongs(plan: Plan, opened: Opened) -> None:
    """Raises PlanError unless the plan was made for these very models."""
    made = "make one with `offspec plan`"
    if plan.target_print != opened.target_print:
        raise PlanError(f"the plan was made for {plan.target}, or for another version of its files; {made}")
    if plan.draft_print != opened.draft_print:
        raise PlanError(f"the plan was made for the draft {plan.draft}, or another version of it; {made}")


def _still_fits(plan: Plan, opened: Opened) -> Outset | str:
    """How to load as the plan says, or why that cannot be."""
    config = replace(opened.config, budget=plan.budget, width=plan.width, context=plan.context)
    free = format_bytes(opened.memory)
    fit = Fit(plan.context, cast(DraftMode, plan.draft_mode), plan.placement, plan.chunk)
    if not opened.holds(config, fit):
        return f"it was made for {format_bytes(plan.memory)} and does not fit in {free}"
    if opened.config.memory is None and plan.placement.slots and opened.memory > _MORE * plan.memory:
        return f"it was made for {format_bytes(plan.memory)}, and {free} are free now"
    return Outset(config, fit, plan)


def _allowance(opened: Opened) -> EngineConfig:
    """Settings with room for the largest trees that take nothing away from what the smallest would leave."""
    config = replace(opened.config, width=opened.config.width or WIDEST)
    if config.budget is not None:
        return config
    allowances = [replace(config, budget=budget) for budget in _ALLOWANCES[opened.target.device.type]]
    smallest = opened.fit(allowances[-1])
    for allowed in allowances:
        fit = opened.fit(allowed)
        if (fit.placement, fit.context, fit.draft_mode) == (
            smallest.placement,
            smallest.context,
            smallest.draft_mode,
        ):
            return allowed
    return allowances[-1]


def plan_key(opened: Opened) -> str:
    """The name under which a plan for this case is kept."""
    config = opened.config
    return ledger.key_of(
        opened.target_print,
        opened.draft_print,
        machine_print(config.device),
        config.memory,
        config.vram,
        config.device,
        config.dtype,
        config.context,
        config.budget,
        config.width,
        config.verify,
        config.tree,
        round(config.temperature, 1),
    )


def measure(opened: Opened, assembly: Assembly, config: EngineConfig, notify: Notify) -> Measured:
    """Try the loaded models; takes some seconds."""
    stage = "Measuring passes and draft steps"
    assert opened.codec is not None
    ids = calibration_ids(opened.codec, 512)
    capacity = assembly.context + (config.budget or 1)
    trial = PassTrial(assembly.target, ids, capacity)
    measured = trial.measure(lambda done, total: notify(LoadProgress(stage, done, total, "layers")))
    if assembly.drafter is None:
        return measured
    step, start = measure_steps(
        assembly.drafter,
        assembly.target.skeleton.vocab_size,
        assembly.target.device,
        ids,
        config.budget or 1,
        config.temperature,
    )
    return replace(measured, step=step, start=start)


def calibration_for(record: DraftRecord, config: EngineConfig) -> tuple[Calibration, str]:
    """What is known of the draft at the planned temperature, and in words where it comes from."""
    coupled = config.verify == "coupled"
    found = record.find(config.temperature, coupled)
    if found is not None and len(found.forest) >= _ENOUGH_TREES:
        return found, f"{_MEASURED} over {found.passes} passes"
    near = record.nearest(config.temperature, coupled)
    if near is not None and len(near.forest) >= _ENOUGH_TREES:
        return near, f"{_MEASURED} over {near.passes} passes at another temperature"
    kind: Literal["substitute", "model"] = "substitute" if config.draft == "auto" else "model"
    name = "a 4-bit substitute" if kind == "substitute" else "a small model of the same family"
    return typical(kind), f"typical of {name}, not measured"


def make_plan(
    opened: Opened,
    loaded: EngineConfig,
    pricing: Pricing,
    calibration: Calibration,
    origin: str,
    hardware: Hardware,
) -> Plan:
    """The fastest settings by these costs.

    loaded: settings with the most nodes there is room for. origin: where the calibration comes from. Raises
    CapacityError.
    """
    wanted = opened.config
    target = sizes_of(opened.target, wanted.model)
    most = loaded.budget or 1
    budgets = [wanted.budget] if wanted.budget else [budget for budget in BUDGETS if budget <= most]
    widths = [wanted.width] if wanted.width else [width for width in WIDTHS if width <= (loaded.width or 1)]
    if opened.draft is None:
        budgets, widths = [1], [1]
    settled, walked, found = loaded, _WALKED, list[Outlook]()
    for _ in range(2):  # the best budget leaves other room for layers than the most, and walks another path
        costs = pricing.costs(target, opened.fit(settled).placement, walked)
        found = sweep(calibration, costs, budgets, widths)
        choice = best(found).choice
        settled, walked = replace(wanted, budget=choice.budget, width=choice.width), choice.tokens_per_pass
    fit = opened.fit(settled)
    costs = pricing.costs(target, fit.placement, walked)
    chosen = outlook(calibration, costs, choice.budget, choice.width)
    least_memory, least_vram = opened.least(settled)
    return Plan(
        target=wanted.model,
        target_print=opened.target_print,
        draft=wanted.draft if opened.draft is not None else "none",
        draft_print=opened.draft_print,
        hardware=hardware,
        device=wanted.device,
        dtype=wanted.dtype,
        memory=opened.memory,
        vram=opened.vram,
        context=fit.context,
        temperature=wanted.temperature,
        draft_mode=fit.draft_mode,
        chunk=fit.chunk,
        parts=opened.parts(settled, fit),
        placement=fit.placement,
        budget=chosen.choice.budget,
        width=chosen.choice.width,
        depth=round(chosen.depth),
        tree=wanted.tree,
        costs=costs,
        forecast=forecast(chosen, costs, target, hardware),
        sweep=tuple(row.choice for row in found),
        what_ifs=WhatIfs(opened, settled, fit, pricing, target, calibration, chosen).rows(),
        acceptance=origin,
        least_memory=least_memory,
        least_vram=least_vram,
        notes=(),
    )


def forecast(chosen: Outlook, costs: PassCosts, target: ModelSizes, hardware: Hardware) -> Forecast:
    """What to expect of a choice, with the time to the first token of a prompt of common length."""
    nodes = max(1, round(chosen.nodes))
    drafted = float(costs.step_seconds(_PROMPT)) + chosen.draft if chosen.draft else 0.0
    prefill = prefill_seconds(costs, target, hardware.processor, _PROMPT + nodes)
    return Forecast(
        ttft_s=drafted + prefill,
        prompt_tokens=_PROMPT,
        seconds_per_pass=chosen.choice.seconds_per_pass,
        tokens_per_pass=chosen.choice.tokens_per_pass,
        tok_per_s=chosen.choice.tok_per_s,
        draft_seconds=chosen.draft,
        compute_seconds=float(costs.compute_seconds(nodes)),
        link_seconds=costs.link,
        bound=costs.bound(chosen.draft, nodes),
    )


def way_of(plan: Plan, loaded: EngineConfig, record: DraftRecord) -> Way:
    """How to grow trees by a plan, within the room that was made."""
    budget = min(plan.budget, loaded.budget or 1)
    width = min(plan.width, loaded.width or 1)
    shape = None
    if plan.tree == "sequoia" and budget > 1:
        calibration, _ = calibration_for(record, loaded)
        shape = choose_shape(calibration.acceptance(), plan.costs, budget, width)
    return Way(
        GrowthPolicy(budget, width, costs=plan.costs), shape, plan, min(2 * budget, loaded.budget or 1)
    )
