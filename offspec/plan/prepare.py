"""Tree policy and placement of a run, from the plan of an earlier run or a new one.

A budget can only be chosen when it is known what passes and draft steps take, and that only when the models
are loaded, for which a budget must be known. So the first load takes room for an allowance, and what is
measured then makes the plan: this run grows its trees by it, and the next one is laid out by it as well.
"""

from dataclasses import dataclass, replace
from typing import cast

import torch

from offspec.checkpoint import local_path
from offspec.core import memory
from offspec.core.config import AUTO, NONE, PLANNED, SUBSTITUTE, DraftBits, EngineConfig, read_drafts
from offspec.core.errors import PlanError
from offspec.core.events import Notice
from offspec.core.setting import settings_of
from offspec.core.trace import OFF, Timeline
from offspec.draft.open import Notify
from offspec.plan import records as ledger
from offspec.plan.choose_device import choose_device
from offspec.plan.hardware_profile import machine_fingerprint
from offspec.plan.initial_fit import InitialFit, initial_fit
from offspec.plan.load import Assembly, load_models, open_models
from offspec.plan.make import CONTENDED, acceptance_for, measure, plan_by
from offspec.plan.model_sizes import expert_sizes
from offspec.plan.opened import OpenedModels
from offspec.plan.policy import DraftPolicy
from offspec.plan.records import DraftRecord, ExpertRecord
from offspec.plan.warm_up import KernelsRefusedError
from offspec_planners.measured_costs import MeasuredCosts
from offspec_planners.placement import Tier
from offspec_planners.plan import Plan

_SETTINGS = settings_of(EngineConfig)
# Settings in the key of a plan, in the order of earlier versions, whose plans stay valid.
_KEYED = (
    *("memory", "vram", "cpu_layers", "experts", "device", "dtype", "kv_cache", "context", "converses"),
    *("budget", "width", "verify", "tree", "temperature"),
)
_APART = ("model", "draft", "draft_bits", "quantize", "sequences")  # as they are in it in other ways
_LATER = [name for name, it in _SETTINGS.items() if it.plan != "none" and name not in (*_KEYED, *_APART)]
_ENOUGH_PASSES = 64  # to know by how experts are asked for
_AT_ONCE = (
    "the whole model fits in memory, so it answers at once, without a draft model; `offspec plan` measures "
    "whether one is faster, and later runs follow that plan"
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything an engine is made of. config: with the budget and width that there is room for.

    record: what is known of the draft, whether or not it is kept; measured: where it had to be.
    """

    config: EngineConfig
    assembly: Assembly
    policy: DraftPolicy
    record: DraftRecord
    opened: OpenedModels
    measured: MeasuredCosts | None = None

    @property
    def main(self) -> str:
        """The drafter that plans are made for, as it was loaded; "none" where none was."""
        return next(iter(self.assembly.sources.drafters), NONE)


def prepare(
    config: EngineConfig,
    notify: Notify,
    timeline: Timeline = OFF,
    *,
    named: Plan | None = None,
    replan: bool = False,
    at_once: bool = False,
) -> Prepared:
    """Open models, decide and load. On an error nothing stays open.

    Args:
        config: Models, memory limits and settings.
        notify: Takes LoadProgress and Notice events.
        timeline: Records loading.
        named: A plan to follow; None: a saved or a new one.
        replan: Measure again, even if there is a plan. Default False.
        at_once: Answer without a draft model where preparing one delays the first token; see
            `_delays_answer`. Default False.

    Raises:
        OffspecError: See `offspec.core.errors`.
    """
    config = choose_device(config, plan=named)
    if named is not None:
        named = replace(  # with the caller's own settings
            named,
            budget=config.budget or named.budget,
            width=config.width or named.width,
            context=config.context or named.context,
        )
        config = _as_planned(config, named)
        named = named if config.draft != NONE or named.draft == NONE else None
    opened = open_models(config, notify, timeline)
    try:
        key = plan_key(opened)
        saved = None if named is not None or replan else ledger.load_plan(key)
        kept = _up_to_date(saved, opened, notify)
        start = initial_fit(opened, None if replan else named, kept, notify)
        if at_once and named is saved is None and not replan and _delays_answer(opened, start):
            notify(Notice(_AT_ONCE))
            if opened.draft is not None:
                opened.draft.close()
            opened = opened.alone()
            start = initial_fit(opened, None, None, notify)
        record = record_of(opened, start.fit.draft_bits)
    except BaseException:
        opened.close()
        raise
    try:
        assembly = load_models(opened, start.config, start.fit, notify)
    except KernelsRefusedError:  # again, without them
        return prepare(config, notify, timeline, named=named, replan=replan, at_once=at_once)
    prepared = Prepared(start.config, assembly, DraftPolicy.fixed(start.config), record, opened)
    if not start.plans and not replan:
        return prepared
    recording = torch.is_grad_enabled()
    try:
        plan, measured = start.plan, None
        if plan is None:
            measured = measure(opened, assembly, start.config, notify)
            if measured.contended:
                notify(Notice(CONTENDED))
            plan = plan_by(opened, start.config, measured, record)
            ledger.save_plan(key, plan)
        policy = DraftPolicy.planned(plan, start.config, record)
    except BaseException:
        torch.set_grad_enabled(recording)  # Ctrl-C may have struck where it was about to be set back
        assembly.sources.close()
        opened.close()
        raise
    left_out = start.fit.drafts_with_model and not plan.drafts_with_model
    if measured is not None and not replan and left_out:
        assembly.sources.close()  # the draft's memory is worth more to the target
        opened.close()
        return prepare(config, notify, timeline, named=plan)
    return replace(prepared, policy=policy, measured=measured)


def _delays_answer(opened: OpenedModels, start: InitialFit) -> bool:
    """Whether preparing a draft, which was not asked for by name, delays the first token more than it helps.

    It does if target and draft stay in memory as a whole and no plan says that drafting pays.
    """
    config, placement = opened.config, start.fit.placement
    if opened.asked != AUTO or not opened.drafts.names:
        return False
    if config.budget or config.width or config.tree != "dynamic":
        return False
    streams = placement.slots or placement.by_need or placement.head is not Tier.DEVICE
    return not streams and len(placement.resident) == len(placement.tiers)


def record_of(opened: OpenedModels, bits: int) -> DraftRecord:
    """The record of the draft when its weights have that number of bits."""
    # What is drawn holds by other odds than what is ranked: as if another draft had guessed it.
    drawn = " drawn" if opened.config.verify == "sequoia" else ""
    return DraftRecord(
        opened.target_print,
        f"{opened.drafts.fingerprint}{drawn}",
        bits,
        kind=opened.drafts.kind,
        typical=opened.drafts.typical,
        keeps=opened.config.learn,
    )


def _up_to_date(kept: Plan | None, opened: OpenedModels, notify: Notify) -> Plan | None:
    """The kept plan, unless something is known by now that was not when it was made: of draft or experts."""
    if kept is None:
        return None
    if _knows_experts(kept, opened):
        notify(Notice("the plan is remade: how experts are asked for is known by now"))
        return None
    if kept.measured:
        return kept
    if not acceptance_for(record_of(opened, kept.draft_bits), opened.config).measured:
        return kept
    notify(Notice("the plan is remade: how well the draft guesses is known by now"))
    return None


def _knows_experts(kept: Plan, opened: OpenedModels) -> bool:
    """Whether enough was learnt of experts of which a plan knew nothing."""
    sizes = expert_sizes(opened.target)
    if kept.costs.experts is None or kept.costs.experts.learnt or sizes is None:
        return False
    use = ExpertRecord(opened.target_print, sizes).use
    # Passes of one row with all experts there say nothing, however many they are.
    return use.passes >= _ENOUGH_PASSES and use.applied(kept.costs.experts).learnt


def _as_planned(config: EngineConfig, plan: Plan) -> EngineConfig:
    """The plan's own settings, where the caller gave none. Raises PlanError for others than the plan's."""
    drafts = plan.drafts_with_model and config.draft != NONE
    recorded = {name: getattr(plan, name) for name in PLANNED}
    for name, planned in (recorded | ({"draft_bits": plan.draft_bits} if drafts else {})).items():
        given = getattr(config, name)
        if given not in (_SETTINGS[name].default, planned):
            has = f"the plan has {name} {planned or 'none'}"
            raise PlanError(f"{has}, not {given}: leave out `{name}`, or the plan")
    beside = len(plan.placement.layers(Tier.CPU))
    if config.cpu_layers not in (None, beside):
        raise PlanError(f"the plan has cpu_layers {beside}, not {config.cpu_layers}: leave out `cpu_layers`")
    experts = config.experts
    if plan.vram is not None and plan.placement.by_need:
        experts = "cpu" if plan.placement.cpu_experts else "gpu"
    if config.experts not in (AUTO, experts):
        raise PlanError(f"the plan has experts {experts}, not {config.experts}: leave out `experts`")
    draft = plan.draft if config.draft == AUTO else config.draft
    # A substitute's bits are chosen anew should the plan not fit, those of a named draft are the user's.
    rounded = drafts and not {AUTO, SUBSTITUTE} & set(read_drafts(draft))
    return replace(
        config,
        draft=draft,
        draft_bits=cast(DraftBits, plan.draft_bits) if rounded else config.draft_bits,
        memory=config.memory or min(plan.memory, memory.available_bytes() + memory.resident_bytes()),
        vram=config.vram or (None if plan.more_vram else plan.vram),
        cpu_layers=beside,
        experts=experts,
        context=plan.context,
        device=plan.device,
        sequences=plan.sequences if config.sequences == 1 else config.sequences,
        temperature=plan.temperature,
        **recorded,
    )


def _place(model: str) -> str:
    """Name of a model that does not depend on the current folder."""
    path, kind = local_path(model)
    return str(path.resolve()) if kind else model


def plan_key(opened: OpenedModels) -> str:
    """The name under which a plan for this case is kept, whatever version of its models it was made for."""
    config = opened.config
    values = {name: getattr(config, name) for name in _SETTINGS}
    values["converses"] = config.converses and config.context is None
    values["temperature"] = round(config.temperature, 1)
    return ledger.key_of(
        _place(config.model),
        config.quantize,
        *map(_place, read_drafts(opened.asked)),
        config.draft_bits,
        machine_fingerprint(config.device),
        opened.runtime,
        *(values[name] for name in _KEYED),
        *([] if config.sequences == 1 else [config.sequences]),
        *((name, values[name]) for name in _LATER if values[name] != _SETTINGS[name].default),
    )
