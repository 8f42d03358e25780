"""Predicted speed for other numbers of sequences, each with its own placement and costs, like a plan."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from offspec_planners.placement import Placement
from offspec_planners.plan.forecast import Shared
from offspec_planners.predictor import Predictor
from offspec_planners.search import WIDTHS, SpeedForecast, best, budgets_for

_COUNTS = (1, 2, 4, 8, 16, 32, 64)
_APART = 4  # factor around the plan's width to try: more trees leave fewer nodes to each

LaidOut = tuple[Placement, int]  # placement, and bytes of all sequences' KV caches and states


@dataclass(frozen=True, slots=True)
class SharedPasses:
    """Passes shared by other numbers of sequences than a plan's.

    Args:
        predictor: Prices of the plan.
        chosen: Speed forecast of the plan.
        planned: Layout of the plan.
        lay_out: Returns the layout for (sequences, budget, width), with the plan's context and draft; None if
            it does not fit.
        most: Maximum nodes of a pass, and of a recorded tree.
        budget: Requested budget; None to choose it.
        width: Requested width; None to choose it.
    """

    predictor: Predictor
    chosen: SpeedForecast
    planned: LaidOut
    lay_out: Callable[[int, int, int], LaidOut | None]
    most: tuple[int, int]
    budget: int | None = None
    width: int | None = None

    def rows(self) -> tuple[Shared, ...]:
        """Return one row for each number that fits; none for a plan of one sequence."""
        own = self.predictor.sequences
        if own == 1:
            return ()
        rows = [
            _row(self.predictor, self.planned, self.chosen) if count == own else self._other(count)
            for count in sorted({*_COUNTS, own})
        ]
        return tuple(row for row in rows if row is not None)

    def _other(self, count: int) -> Shared | None:
        """Return the best of some budgets for another number; None if it does not fit."""
        predictor, planned = replace(self.predictor, sequences=count), self.chosen.choice
        budget = max(planned.budget, count) if predictor.drafts else count
        laid_out = self.lay_out(count, budget, planned.width)
        if laid_out is None:
            return None
        chosen = self._best(predictor, laid_out[0])
        laid_out = self.lay_out(count, chosen.choice.budget, chosen.choice.width)
        if laid_out is None:
            return None
        costs = predictor.costs(laid_out[0], chosen.choice.tokens_per_pass)
        return _row(predictor, laid_out, predictor.refined(costs, chosen))

    def _best(self, predictor: Predictor, placement: Placement) -> SpeedForecast:
        (most, largest), count, width = self.most, predictor.sequences, self.chosen.choice.width
        budgets = budgets_for(count, min(most, count * largest)) if predictor.drafts else [count]
        budgets = [max(self.budget, count)] if self.budget else budgets
        near = [wide for wide in WIDTHS if width / _APART <= wide <= width * _APART]
        fixed = self.width or not near or predictor.tree == "sequoia"
        costs = predictor.costs(placement, float(count))
        return best(predictor.sweep(costs, budgets, [width] if fixed else near))


def _row(predictor: Predictor, laid_out: LaidOut, found: SpeedForecast) -> Shared:
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
