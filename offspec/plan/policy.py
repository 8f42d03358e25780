"""Tree growth of an engine: by a plan, or by a configuration."""

from dataclasses import dataclass, replace

from offspec.core.config import EngineConfig
from offspec.draft.grow.tree_grower import GrowthPolicy
from offspec.plan.build_plan import acceptance_for
from offspec.plan.fit import LOOKUP_BUDGETS
from offspec.plan.initial_fit import RECORD_FACTOR
from offspec.plan.needs import max_width, tree_nodes
from offspec.plan.records import DraftRecord
from offspec_planners.acceptance import Calibration
from offspec_planners.cost import PassCosts
from offspec_planners.plan import Plan
from offspec_planners.search import forecast_speed
from offspec_planners.sequoia import TreeShape, choose_tree_shape

_RECORD_EVERY, _RECORD_WIDTH = 4, 32  # passes between two records, grown in few steps: it takes time
_WHOLE_FOREST = 24  # recorded trees that are enough to know a draft


@dataclass(frozen=True, slots=True)
class DraftPolicy:
    """Tree growth for each request of an engine.

    Args:
        growth: Budget, width and costs of best-first growth.
        shape: Shape of every tree, if it is fixed.
        plan: The plan that this follows.
        record: Maximum nodes to grow to for later plans, while few trees are on record.
        lookup_budget: Maximum nodes if lookups draft as well. Their tokens are not in the plan, and only
            profitable nodes of such a tree are verified.
        planned_budget: The budget of the plan, whatever was learned since.
        rests: Whether drafters are paused while passes without any are faster. Default False.
    """

    growth: GrowthPolicy
    shape: TreeShape | None = None
    plan: Plan | None = None
    record: int = 0
    lookup_budget: int = 1
    planned_budget: int = 1
    may_pause: bool = False

    @classmethod
    def fixed(cls, config: EngineConfig) -> "DraftPolicy":
        """Return the policy of a configuration without a plan."""
        return cls(GrowthPolicy(tree_nodes(config), max_width(config)), may_pause=True)

    @classmethod
    def planned(cls, plan: Plan, loaded: EngineConfig, record: DraftRecord) -> "DraftPolicy":
        """Return the policy of a plan, within the budget and width that models were loaded with."""
        drafts = plan.budget > plan.sequences  # otherwise every sequence has a root only
        budget = min(plan.budget, tree_nodes(loaded)) if drafts else 1
        width = min(plan.width, loaded.width or 1)
        shape = None
        if plan.tree == "sequoia" and budget > 1:
            known = acceptance_for(record, loaded).calibration
            shape = choose_tree_shape(known.acceptance(), plan.costs, budget, width)
        costs = plan.costs
        ahead = costs.hidden > 0 and plan.sequences == 1 and bool(costs.is_transfer_bound(budget))
        return cls(
            # Steps during growth overlap with nothing.
            GrowthPolicy(budget, width, costs=replace(costs, hidden=0.0), ahead=ahead),
            shape,
            plan,
            record=min(RECORD_FACTOR * budget, loaded.budget or 1),
            lookup_budget=min(LOOKUP_BUDGETS[loaded.device.split(":")[0]], loaded.budget or 1),
            planned_budget=budget,
            may_pause=True,
        )

    def with_costs(self, costs: PassCosts, known: Calibration | None) -> "DraftPolicy":
        """Return the policy with other costs: without the plan's draft while it does not pay by these costs.

        A fixed shape is kept, since it was chosen in advance and sampled draft tokens depend on it.

        Args:
            costs: Costs of passes and steps.
            known: Calibration of that draft; None if there is none.
        """
        budget, width = self.planned_budget, self.growth.width
        if known is not None and budget > 1 and self.shape is None:
            drafted, alone = forecast_speed(known, costs, budget, width), forecast_speed(known, costs, 1, 1)
            if drafted.choice.tok_per_s < alone.choice.tok_per_s:
                budget = 1
        return replace(self, growth=replace(self.growth, budget=budget, costs=costs))

    def recording_policy(self, calibration: Calibration) -> GrowthPolicy | None:
        """Return a policy for growing a tree beyond the budget, now and then while little is on record;
        else None.
        """
        known = len(calibration.forest) >= _WHOLE_FOREST or (calibration.passes + 1) % _RECORD_EVERY
        if known or self.record <= self.growth.budget:
            return None
        width = max(self.growth.width, min(self.record, _RECORD_WIDTH))
        return replace(self.growth, record=self.record, width=width)

    def with_lookups(self, growth: GrowthPolicy) -> GrowthPolicy:
        """Return the growth policy with room for the draft tokens of lookups."""
        if growth.costs is None:
            return growth
        return replace(growth, budget=max(growth.budget, self.lookup_budget))
