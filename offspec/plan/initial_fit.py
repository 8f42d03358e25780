"""Initial load settings: from a plan that still fits, or with enough memory to make a plan."""

from dataclasses import dataclass, replace

from offspec.core.config import AUTO, EngineConfig
from offspec.core.errors import PlanError
from offspec.core.events import Notice
from offspec.draft.open import Notify
from offspec.plan.fit import LEAST_BUDGET, Fit, find_fit, nodes_without_draft, still_fits, try_fit
from offspec.plan.hardware_profile import machine_fingerprint
from offspec.plan.needs import with_max_width
from offspec.plan.opened import OpenedModels
from offspec_planners.plan import Plan
from offspec_planners.search import shared_budgets
from offspec_planners.units import format_bytes

# Nodes to reserve room for, before the profitable number is known: the first that fits at all, and more
# if that displaces no layer.
_ALLOWANCES = {"cpu": (128, 64, LEAST_BUDGET), "cuda": (256, 64, LEAST_BUDGET)}
_LARGER = {"cpu": (512, 256), "cuda": (1024, 512)}
RECORD_FACTOR = 2  # nodes of a recorded tree per node of the budget; shows the effect of larger budgets
_MORE = 1.25  # a plan is remade if free memory has grown by this factor


@dataclass(frozen=True, slots=True)
class InitialFit:
    """Settings with budget and width filled in, and the fit in memory.

    plan: the plan that is followed. uses_plan: whether there is a plan, or one will be made.
    """

    config: EngineConfig
    fit: Fit
    plan: Plan | None = None
    uses_plan: bool = True


def initial_fit(opened: OpenedModels, named: Plan | None, kept: Plan | None, notify: Notify) -> InitialFit:
    """Return how to load the models: by the plan that the user named or an earlier run saved.

    Without a plan, or if both budget and width are given, the configuration decides; a budget that is not
    given becomes an initial budget. A plan that no longer fits is dropped, with a notice. Raises PlanError
    for a named plan of other models, CapacityError, RequestError.
    """
    config = opened.config
    if named is not None:
        _belongs(named, opened)
    elif not opened.drafts.names:
        alone = replace(config, budget=nodes_without_draft(opened), width=config.width or 1)
        fit = find_fit(opened, alone)
        # Draft tokens from lookups are priced if every node may need experts that have to be read.
        roots = alone.budget == config.min_sequences
        if config.budget or roots or not fit.placement.on_demand_experts:
            return InitialFit(alone, fit, uses_plan=False)
        if kept is None:
            return InitialFit(alone, fit)
    elif config.budget and config.width and config.tree == "dynamic":
        return InitialFit(config, find_fit(opened, config), uses_plan=False)
    plan = named or kept
    found = fit_from_plan(plan, opened, notify) if plan is not None else None
    if found is not None:
        return found
    allowed = _allowance(opened)
    return InitialFit(allowed, find_fit(opened, allowed))


def fit_from_plan(plan: Plan, opened: OpenedModels, notify: Notify) -> InitialFit | None:
    """Return how to load by a plan; None, and a notice, if the plan no longer fits the models."""
    found = _still_fits(plan, opened)
    if isinstance(found, InitialFit):
        return found
    notify(Notice(f"planning again: {found}"))
    return None


def _belongs(plan: Plan, opened: OpenedModels) -> None:
    """Raise PlanError unless the plan was made for these models."""
    made = "make one with `offspec plan`"
    if plan.hardware.fingerprint() != machine_fingerprint(opened.config.device):
        raise PlanError(f"the plan was made for another machine, {plan.hardware.name}; {made}")
    if plan.target_print != opened.target_fingerprint:
        raise PlanError(f"the plan was made for {plan.target}, or for another version of its files; {made}")
    if plan.draft_print != opened.drafts.fingerprint:
        raise PlanError(f"the plan was made for the draft {plan.draft}, or another version of it; {made}")


def _still_fits(plan: Plan, opened: OpenedModels) -> InitialFit | str:
    """Return how to load by the plan, or the reason why that is impossible."""
    for name, made, here in (
        (plan.target, plan.target_print, opened.target_fingerprint),
        (plan.draft, plan.draft_print, opened.drafts.fingerprint),
    ):
        if made != here:
            other = "draft than the one selected now" if name == AUTO else f"version of {name}"
            return f"the plan is for another {other}"
    config = replace(opened.config, budget=plan.budget, width=plan.width, context=plan.context)
    free = format_bytes(opened.memory)
    fit = Fit.of_plan(plan)
    if not still_fits(opened, config, fit):
        return f"the plan is for {format_bytes(plan.memory)} and does not fit in {free}"
    reads = plan.placement.slots or 0 < plan.placement.expert_slots < opened.target.experts.count
    if opened.config.memory is None and reads and opened.memory > _MORE * plan.memory:
        return f"the plan is for {format_bytes(plan.memory)}, and {free} are free now"
    more = replace(config, budget=RECORD_FACTOR * plan.budget)
    if plan.budget > 1 and not plan.measured and still_fits(opened, more, fit):
        config = more  # until the draft's acceptance rate is known, there must be room to measure it
    found = replace(config, budget=max(config.budget or 1, nodes_without_draft(opened)))
    if opened.config.budget is None and still_fits(opened, found, fit):
        config = found  # draft tokens from lookups are not in the plan
    return InitialFit(config, fit, plan)


def _allowance(opened: OpenedModels) -> EngineConfig:
    """Return settings with room for trees of common sizes, or for larger ones if that displaces no layer."""
    config, kind = opened.config, opened.target.device.type
    if config.budget is not None:
        return with_max_width(config)
    sequences = config.min_sequences
    for budget in _ALLOWANCES[kind]:
        allowed = with_max_width(replace(config, budget=max(budget, sequences)))
        if (found := try_fit(opened, allowed)) is not None:
            break
    fit = found or find_fit(opened, allowed)  # raises the error
    budgets = (*shared_budgets(sequences), *_LARGER[kind])
    for budget in (budget for budget in budgets if budget > (allowed.budget or 1)):
        larger = with_max_width(replace(config, budget=budget))
        found = try_fit(opened, larger)
        if found is not None and replace(found, chunk=fit.chunk) == fit:
            return larger
    return allowed
