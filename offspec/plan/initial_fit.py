"""How to load what was opened: as a plan says that still fits, or with room to find a plan out."""

from dataclasses import dataclass, replace

from offspec.core.config import AUTO, EngineConfig
from offspec.core.errors import PlanError
from offspec.core.events import Notice
from offspec.draft.open import Notify
from offspec.plan.fit import LEAST_BUDGET, Fit, find_fit, still_fits, try_fit, undrafted_nodes
from offspec.plan.hardware_profile import machine_fingerprint
from offspec.plan.needs import with_most_width
from offspec.plan.opened import OpenedModels
from offspec_planners.plan import Plan
from offspec_planners.search import shared_budgets
from offspec_planners.units import format_bytes

# Nodes to make room for, before it is known how many pay: the first that there is room for at all, and more
# where that takes nothing from the layers.
_ALLOWANCES = {"cpu": (128, 64, LEAST_BUDGET), "cuda": (256, 64, LEAST_BUDGET)}
_LARGER = {"cpu": (512, 256), "cuda": (1024, 512)}
RECORDED = 2  # times the budget: nodes of a recorded tree, which tells what larger budgets would bring
_MORE = 1.25  # a plan is remade where so much more memory is free than when it was made


@dataclass(frozen=True, slots=True)
class InitialFit:
    """How to load: settings with budget and width filled in, and what goes where.

    plan: the one that is followed; plans: whether there is one, or is to be one.
    """

    config: EngineConfig
    fit: Fit
    plan: Plan | None = None
    plans: bool = True


def initial_fit(opened: OpenedModels, named: Plan | None, kept: Plan | None, notify: Notify) -> InitialFit:
    """How to load what was opened: as the plan says that the user named or an earlier run left.

    Without one, or where both budget and width are given, as the configuration says; a budget that is not
    given becomes an allowance. A plan that no longer fits is left out, with a notice. Raises PlanError for a
    named plan of other models, CapacityError, RequestError.
    """
    config = opened.config
    if named is not None:
        _belongs(named, opened)
    elif not opened.drafts.names:
        alone = replace(config, budget=undrafted_nodes(opened), width=config.width or 1)
        fit = find_fit(opened, alone)
        # What lookups find is priced where every node may ask for experts that have to be read.
        roots = alone.budget == config.least_sequences
        if config.budget or roots or not fit.placement.by_need:
            return InitialFit(alone, fit, plans=False)
        if kept is None:
            return InitialFit(alone, fit)
    elif config.budget and config.width and config.tree == "dynamic":
        return InitialFit(config, find_fit(opened, config), plans=False)
    plan = named or kept
    found = fit_of_plan(plan, opened, notify) if plan is not None else None
    if found is not None:
        return found
    allowed = _allowance(opened)
    return InitialFit(allowed, find_fit(opened, allowed))


def fit_of_plan(plan: Plan, opened: OpenedModels, notify: Notify) -> InitialFit | None:
    """How to load as a plan says; None, and a notice, where it no longer fits what was opened."""
    found = _still_fits(plan, opened)
    if isinstance(found, InitialFit):
        return found
    notify(Notice(f"the plan is remade: {found}"))
    return None


def _belongs(plan: Plan, opened: OpenedModels) -> None:
    """Raises PlanError unless the plan was made for these very models."""
    made = "make one with `offspec plan`"
    if plan.hardware.fingerprint() != machine_fingerprint(opened.config.device):
        raise PlanError(f"the plan was made for another machine, {plan.hardware.name}; {made}")
    if plan.target_print != opened.target_print:
        raise PlanError(f"the plan was made for {plan.target}, or for another version of its files; {made}")
    if plan.draft_print != opened.drafts.fingerprint:
        raise PlanError(f"the plan was made for the draft {plan.draft}, or another version of it; {made}")


def _still_fits(plan: Plan, opened: OpenedModels) -> InitialFit | str:
    """How to load as the plan says, or why that cannot be."""
    for name, made, here in (
        (plan.target, plan.target_print, opened.target_print),
        (plan.draft, plan.draft_print, opened.drafts.fingerprint),
    ):
        if made != here:
            other = "draft than is best now" if name == AUTO else f"version of {name}"
            return f"it was made for another {other}"
    config = replace(opened.config, budget=plan.budget, width=plan.width, context=plan.context)
    free = format_bytes(opened.memory)
    fit = Fit.of_plan(plan)
    if not still_fits(opened, config, fit):
        return f"it was made for {format_bytes(plan.memory)} and does not fit in {free}"
    reads = plan.placement.slots or 0 < plan.placement.expert_slots < opened.target.experts.count
    if opened.config.memory is None and reads and opened.memory > _MORE * plan.memory:
        return f"it was made for {format_bytes(plan.memory)}, and {free} are free now"
    more = replace(config, budget=RECORDED * plan.budget)
    if plan.budget > 1 and not plan.measured and still_fits(opened, more, fit):
        config = more  # until it is known how well the draft guesses, there must be room to find out
    found = replace(config, budget=max(config.budget or 1, undrafted_nodes(opened)))
    if opened.config.budget is None and still_fits(opened, found, fit):
        config = found  # what lookups find is not in the plan
    return InitialFit(config, fit, plan)


def _allowance(opened: OpenedModels) -> EngineConfig:
    """Settings with room for trees of common sizes, or for larger ones where they cost no layer its place."""
    config, kind = opened.config, opened.target.device.type
    if config.budget is not None:
        return with_most_width(config)
    sequences = config.least_sequences
    for budget in _ALLOWANCES[kind]:
        allowed = with_most_width(replace(config, budget=max(budget, sequences)))
        if (found := try_fit(opened, allowed)) is not None:
            break
    fit = found or find_fit(opened, allowed)  # which raises
    budgets = (*shared_budgets(sequences), *_LARGER[kind])
    for budget in (budget for budget in budgets if budget > (allowed.budget or 1)):
        larger = with_most_width(replace(config, budget=budget))
        found = try_fit(opened, larger)
        if found is not None and replace(found, chunk=fit.chunk) == fit:
            return larger
    return allowed
