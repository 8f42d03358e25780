"""Tree policy and placement of a run, from the plan of an earlier run or a new one.

A budget can be chosen only when the time of passes and draft steps is known, and that only when the models
are loaded, for which a budget is needed. So the first load reserves room for an initial budget, and the
measurements then make the plan: this run grows its trees by it, and the next one is placed by it as well.
"""

from dataclasses import dataclass, replace
from typing import cast

import torch

from offspec.checkpoint import local_path
from offspec.core import memory
from offspec.core.config import (
    AUTO,
    FORMER_SELF_DRAFT,
    NONE,
    PLANNED,
    SELF_DRAFT,
    DraftBits,
    EngineConfig,
    read_drafts,
)
from offspec.core.errors import PlanError
from offspec.core.events import Notice
from offspec.core.setting import settings_of
from offspec.core.trace import OFF, Timeline
from offspec.draft.open import Notify
from offspec.plan import records
from offspec.plan.build_plan import CONTENDED, acceptance_for, measure, plan_from_measurements
from offspec.plan.choose_device import choose_device
from offspec.plan.hardware_profile import machine_fingerprint
from offspec.plan.initial_fit import InitialFit, initial_fit
from offspec.plan.load import Assembly, load_models, open_models
from offspec.plan.model_sizes import expert_sizes
from offspec.plan.opened import OpenedModels
from offspec.plan.policy import DraftPolicy
from offspec.plan.records import DraftRecord, ExpertRecord
from offspec.plan.warm_up import KernelsUnavailableError
from offspec_planners.measured_costs import MeasuredCosts
from offspec_planners.placement import Tier
from offspec_planners.plan import Plan

_SETTINGS = settings_of(EngineConfig)
# Settings in the key of a plan, in the order of earlier versions, whose plans stay valid.
_KEYED = (
    *("memory", "vram", "cpu_layers", "experts", "device", "dtype", "kv_cache", "context", "converses"),
    *("budget", "width", "verify", "tree", "temperature"),
)
_APART = ("model", "draft", "draft_bits", "quantize", "sequences")  # these are in the key in other forms
_LATER = [name for name, it in _SETTINGS.items() if it.plan != "none" and name not in (*_KEYED, *_APART)]
_ENOUGH_PASSES = 64  # to know the usage of experts
_AT_ONCE = (
    "the whole model fits in memory, so it starts without a draft model; `offspec plan` measures whether a "
    "draft is faster, and later runs follow that plan"
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything an engine is made of. config: settings with the budget and width that fit.

    record: record of the draft, whether or not it is saved. measured: measured costs, if they were needed.
    """

    config: EngineConfig
    assembly: Assembly
    policy: DraftPolicy
    record: DraftRecord
    opened: OpenedModels
    measured: MeasuredCosts | None = None

    @property
    def main(self) -> str:
        """Name of the loaded drafter that plans are made for; "none" if there is none."""
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
        at_once: Answer without a draft model if preparing one delays the first token; see `_delays_answer`.
            Default False.

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
        saved = None if named is not None or replan else records.load_plan(key)
        kept = _still_current(saved, opened, notify)
        start = initial_fit(opened, None if replan else named, kept, notify)
        if at_once and named is saved is None and not replan and _delays_answer(opened, start):
            notify(Notice(_AT_ONCE))
            if opened.draft is not None:
                opened.draft.close()
            opened = opened.alone()
            start = initial_fit(opened, None, None, notify)
        record = draft_record(opened, start.fit.draft_bits)
    except BaseException:
        opened.close()
        raise
    try:
        assembly = load_models(opened, start.config, start.fit, notify)
    except KernelsUnavailableError:  # again, without them
        return prepare(config, notify, timeline, named=named, replan=replan, at_once=at_once)
    prepared = Prepared(start.config, assembly, DraftPolicy.fixed(start.config), record, opened)
    if not start.uses_plan and not replan:
        return prepared
    recording = torch.is_grad_enabled()
    try:
        plan, measured = start.plan, None
        if plan is None:
            measured = measure(opened, assembly, start.config, notify)
            if measured.contended:
                notify(Notice(CONTENDED))
            plan = plan_from_measurements(opened, start.config, measured, record)
            records.save_plan(key, plan)
        policy = DraftPolicy.planned(plan, start.config, record)
    except BaseException:
        torch.set_grad_enabled(recording)  # Ctrl-C may have struck before it was set back
        assembly.sources.close()
        opened.close()
        raise
    left_out = start.fit.drafts_with_model and not plan.drafts_with_model
    if measured is not None and not replan and left_out:
        assembly.sources.close()  # the target makes better use of the draft's memory
        opened.close()
        return prepare(config, notify, timeline, named=plan)
    return replace(prepared, policy=policy, measured=measured)


def _delays_answer(opened: OpenedModels, start: InitialFit) -> bool:
    """Return whether preparing a draft selected by "auto" delays the first token more than it helps.

    That is so if target and draft stay in memory completely and no plan says that drafting pays.
    """
    config, placement = opened.config, start.fit.placement
    if opened.draft_option != AUTO or not opened.drafts.names:
        return False
    if config.budget or config.width or config.tree != "dynamic":
        return False
    streams = placement.slots or placement.on_demand_experts or placement.head is not Tier.DEVICE
    return not streams and len(placement.resident) == len(placement.tiers)


def draft_record(opened: OpenedModels, bits: int) -> DraftRecord:
    """Return the record of the draft with weights of that number of bits."""
    # Sampled draft tokens have other acceptance rates than ranked ones: as if from another draft.
    drawn = " drawn" if opened.config.verify == "sequoia" else ""
    return DraftRecord(
        opened.target_fingerprint,
        f"{opened.drafts.fingerprint}{drawn}",
        bits,
        kind=opened.drafts.kind,
        typical=opened.drafts.typical,
        keeps=opened.config.learn,
    )


def _still_current(kept: Plan | None, opened: OpenedModels, notify: Notify) -> Plan | None:
    """Return the saved plan, unless more is known now than when it was made: about the draft or the
    experts.
    """
    if kept is None:
        return None
    if _knows_experts(kept, opened):
        notify(Notice("planning again: the use of experts is now measured"))
        return None
    if kept.measured:
        return kept
    if not acceptance_for(draft_record(opened, kept.draft_bits), opened.config).measured:
        return kept
    notify(Notice("planning again: the draft's acceptance rate is now measured"))
    return None


def _knows_experts(kept: Plan, opened: OpenedModels) -> bool:
    """Return whether enough was learned about experts that were unknown to a plan."""
    sizes = expert_sizes(opened.target)
    if kept.costs.experts is None or kept.costs.experts.learnt or sizes is None:
        return False
    use = ExpertRecord(opened.target_fingerprint, sizes).use
    # Passes of one row with all experts cached show nothing, however many they are.
    return use.passes >= _ENOUGH_PASSES and use.applied(kept.costs.experts).learnt


def _as_planned(config: EngineConfig, plan: Plan) -> EngineConfig:
    """Fill in the plan's settings that the caller did not give. Raises PlanError for conflicting settings."""
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
    if plan.vram is not None and plan.placement.on_demand_experts:
        experts = "cpu" if plan.placement.cpu_experts else "gpu"
    if config.experts not in (AUTO, experts):
        raise PlanError(f"the plan has experts {experts}, not {config.experts}: leave out `experts`")
    draft = plan.draft if config.draft == AUTO else config.draft
    # If the plan does not fit, a self-draft's bits are chosen again; those of a named draft are the user's
    # choice.
    rounded = drafts and not {AUTO, SELF_DRAFT} & set(read_drafts(draft))
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
    """Return a model's name independent of the current folder."""
    path, kind = local_path(model)
    return str(path.resolve()) if kind else model


def _draft_key(name: str) -> str:
    """Return a draft's part of a plan's key; the self-draft keeps the name it had in earlier versions."""
    return FORMER_SELF_DRAFT if name == SELF_DRAFT else _place(name)


def plan_key(opened: OpenedModels) -> str:
    """Return the key under which a plan for this case is saved, independent of the version of its models."""
    config = opened.config
    values = {name: getattr(config, name) for name in _SETTINGS}
    values["converses"] = config.converses and config.context is None
    values["temperature"] = round(config.temperature, 1)
    return records.key_of(
        _place(config.model),
        config.quantize,
        *map(_draft_key, read_drafts(opened.draft_option)),
        config.draft_bits,
        machine_fingerprint(config.device),
        opened.runtime,
        *(values[name] for name in _KEYED),
        *([] if config.sequences == 1 else [config.sequences]),
        *((name, values[name]) for name in _LATER if values[name] != _SETTINGS[name].default),
    )
