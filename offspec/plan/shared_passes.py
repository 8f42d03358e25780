"""Predicted speed of other numbers of sequences that share passes, each laid out and priced as a plan is."""

from dataclasses import dataclass, replace

from offspec.core.config import EngineConfig
from offspec.plan.fit import Fit, cache_bytes, try_fit
from offspec.plan.opened import OpenedModels
from offspec_planners.placement import Placement, Tier
from offspec_planners.plan.forecast import Shared
from offspec_planners.predictor import Predictor
from offspec_planners.search import WIDTHS, Outlook, best, budgets_for

_COUNTS = (1, 2, 4, 8, 16, 32, 64)
_APART = 4  # times the plan's width, and a part of it: more trees leave fewer nodes to each

LaidOut = tuple[Placement, int]  # and bytes of the KV caches and states of all sequences


@dataclass(frozen=True, slots=True)
class SettledPlan:
    """A plan whose settings are chosen.

    Args:
        opened: Models that memory is divided among.
        config: Settings of the plan.
        fit: What fits where by the plan.
        predictor: Prices of the plan.
        chosen: Outlook of the plan.
    """

    opened: OpenedModels
    config: EngineConfig
    fit: Fit
    predictor: Predictor
    chosen: Outlook


@dataclass(frozen=True, slots=True)
class SharedPasses(SettledPlan):
    """Passes of other numbers of sequences than those of a plan.

    Args:
        most: Most nodes of a pass, and of one tree that is known.
    """

    most: tuple[int, int]

    def rows(self) -> tuple[Shared, ...]:
        """One row for each number that fits; none for a plan of one sequence."""
        own = self.predictor.sequences
        if own == 1:
            return ()
        planned = self.fit.placement, cache_bytes(self.opened, self.config, self.fit)
        rows = [
            _row(self.predictor, planned, self.chosen) if count == own else self._other(count)
            for count in sorted({*_COUNTS, own})
        ]
        return tuple(row for row in rows if row is not None)

    def _lay_out(self, sequences: int, budget: int, width: int) -> LaidOut | None:
        """With the plan's draft and context, and caches in RAM only if those of the plan are."""
        context = self.fit.context
        config = replace(self.config, sequences=sequences, budget=budget, width=width, context=context)
        found = try_fit(self.opened, config, held=self.fit.held)
        if found is None or found.placement.caches is Tier.HOST is not self.fit.placement.caches:
            return None
        return found.placement, cache_bytes(self.opened, config, found)

    def _other(self, count: int) -> Shared | None:
        """The best of some budgets for another number; None if it does not fit."""
        predictor, planned = replace(self.predictor, sequences=count), self.chosen.choice
        budget = max(planned.budget, count) if predictor.drafts else count
        laid_out = self._lay_out(count, budget, planned.width)
        if laid_out is None:
            return None
        chosen = self._best(predictor, laid_out[0])
        laid_out = self._lay_out(count, chosen.choice.budget, chosen.choice.width)
        if laid_out is None:
            return None
        costs = predictor.costs(laid_out[0], chosen.choice.tokens_per_pass)
        return _row(predictor, laid_out, predictor.refined(costs, chosen))

    def _best(self, predictor: Predictor, placement: Placement) -> Outlook:
        (most, largest), count, width = self.most, predictor.sequences, self.chosen.choice.width
        wanted = self.opened.config
        budgets = budgets_for(count, min(most, count * largest)) if predictor.drafts else [count]
        budgets = [max(wanted.budget, count)] if wanted.budget else budgets
        near = [wide for wide in WIDTHS if width / _APART <= wide <= width * _APART]
        fixed = wanted.width or not near or predictor.tree == "sequoia"
        costs = predictor.costs(placement, float(count))
        return best(predictor.sweep(costs, budgets, [width] if fixed else near))


def _row(predictor: Predictor, laid_out: LaidOut, found: Outlook) -> Shared:
    placement, caches = laid_out
    choice, count = found.choice, predictor.sequences
    costs = predictor.costs(placement, choice.tokens_per_pass).for_sequences(count)
    return Shared(
        sequences=count,
        budget=choice.budget,
        tok_per_s=choice.tok_per_s,
        tokens_per_pass=choice.tokens_per_pass,
        seconds_per_pass=choice.seconds_per_pass,
        link_seconds=float(costs.link_seconds(found.nodes)),
        caches=caches,
    )
