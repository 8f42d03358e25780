"""How an engine grows its trees: as a plan says, or as a configuration does."""

from dataclasses import dataclass, replace

from offspec.core.config import EngineConfig
from offspec.draft.grow.growing import GrowthPolicy
from offspec.plan.fit import LOOKED_UP
from offspec.plan.initial_fit import RECORDED
from offspec.plan.make import acceptance_for
from offspec.plan.needs import most_width, tree_nodes
from offspec.plan.records import DraftRecord
from offspec_planners.acceptance import Calibration
from offspec_planners.cost import PassCosts
from offspec_planners.plan import Plan
from offspec_planners.search import outlook
from offspec_planners.sequoia import TreeShape, choose_tree_shape

_RECORD_EVERY, _RECORD_WIDTH = 4, 32  # passes from one record to the next, grown in few steps: it takes time
_WHOLE_FOREST = 24  # recorded trees, to know a draft well


@dataclass(frozen=True, slots=True)
class DraftPolicy:
    """How trees are grown for each request of an engine.

    Args:
        growth: Budget, width and costs of best-first growth.
        shape: Shape of every tree, where it is fixed.
        plan: The plan that this follows.
        record: Most nodes to grow on to, for later plans, while few trees are on record.
        lookup_budget: Most nodes where lookups draft as well. What they find is not in the plan, and of its
            tree only what pays is verified.
        planned_budget: The budget of the plan, whatever was learnt since.
        rests: Whether drafters rest while passes without any are faster. Default False.
    """

    growth: GrowthPolicy
    shape: TreeShape | None = None
    plan: Plan | None = None
    record: int = 0
    lookup_budget: int = 1
    planned_budget: int = 1
    rests: bool = False

    @classmethod
    def fixed(cls, config: EngineConfig) -> "DraftPolicy":
        """As the configuration says, with nothing planned."""
        return cls(GrowthPolicy(tree_nodes(config), most_width(config)), rests=True)

    @classmethod
    def planned(cls, plan: Plan, loaded: EngineConfig, record: DraftRecord) -> "DraftPolicy":
        """As a plan says, within the budget and width that models were loaded with."""
        drafts = plan.budget > plan.sequences  # else every sequence has a root alone
        budget = min(plan.budget, tree_nodes(loaded)) if drafts else 1
        width = min(plan.width, loaded.width or 1)
        shape = None
        if plan.tree == "sequoia" and budget > 1:
            known = acceptance_for(record, loaded).calibration
            shape = choose_tree_shape(known.acceptance(), plan.costs, budget, width)
        costs = plan.costs
        ahead = costs.hidden > 0 and plan.sequences == 1 and bool(costs.link_binds(budget))
        return cls(
            # What a step takes while a tree grows is hidden behind nothing.
            GrowthPolicy(budget, width, costs=replace(costs, hidden=0.0), ahead=ahead),
            shape,
            plan,
            record=min(RECORDED * budget, loaded.budget or 1),
            lookup_budget=min(LOOKED_UP[loaded.device.split(":")[0]], loaded.budget or 1),
            planned_budget=budget,
            rests=True,
        )

    def priced(self, costs: PassCosts, known: Calibration | None) -> "DraftPolicy":
        """The same by other costs: without the plan's draft as long as that does not pay by them.

        A fixed shape stays. It was chosen beforehand, and tokens that are drawn by it depend on it.

        Args:
            costs: Of passes and steps.
            known: What is known of that draft; None where there is none.
        """
        budget, width = self.planned_budget, self.growth.width
        if known is not None and budget > 1 and self.shape is None:
            drafted, alone = outlook(known, costs, budget, width), outlook(known, costs, 1, 1)
            if drafted.choice.tok_per_s < alone.choice.tok_per_s:
                budget = 1
        return replace(self, growth=replace(self.growth, budget=budget, costs=costs))

    def recording(self, calibration: Calibration) -> GrowthPolicy | None:
        """How to grow a tree beyond what is verified: now and then while little is on record; else None."""
        known = len(calibration.forest) >= _WHOLE_FOREST or (calibration.passes + 1) % _RECORD_EVERY
        if known or self.record <= self.growth.budget:
            return None
        width = max(self.growth.width, min(self.record, _RECORD_WIDTH))
        return replace(self.growth, record=self.record, width=width)

    def with_lookups(self, growth: GrowthPolicy) -> GrowthPolicy:
        """The same with room for what lookups find."""
        if growth.costs is None:
            return growth
        return replace(growth, budget=max(growth.budget, self.lookup_budget))
