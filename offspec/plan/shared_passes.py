"""What other numbers of sequences would give that share passes: each laid out and priced as a plan is."""

from contextlib import suppress
from dataclasses import dataclass, replace

from offspec.core.config import EngineConfig
from offspec.core.errors import CapacityError
from offspec.plan.fit import Fit, Opened
from offspec_planners.acceptance import Calibration
from offspec_planners.cost import ModelSizes, PassCosts, Pricing
from offspec_planners.placement import Tier
from offspec_planners.plan import Shared
from offspec_planners.search import WIDTHS, Outlook, best, budgets_for, outlook, static_sweep, sweep

_COUNTS = (1, 2, 4, 8, 16, 32, 64)
_APART = 4  # times the plan's width, and a part of it: more trees leave fewer nodes to each


@dataclass(frozen=True, slots=True)
class SharedPasses:
    """Passes of other numbers of sequences than those of a plan.

    Args:
        opened: What memory is divided among.
        config: The plan's settings, with a budget and a width.
        fit: What fits where by the plan.
        pricing: What passes cost.
        target: Sizes of the target.
        calibration: How often the draft's tokens hold.
        most: Most nodes of a pass, and of one tree that is known.
    """

    opened: Opened
    config: EngineConfig
    fit: Fit
    pricing: Pricing
    target: ModelSizes
    calibration: Calibration
    most: tuple[int, int]

    def rows(self, chosen: Outlook) -> tuple[Shared, ...]:
        """One for each number that fits with the plan's context and draft; none where that is for one.

        chosen: What the plan itself gives.
        """
        planned = self.config.least_sequences
        if planned == 1:
            return ()
        rows = list[Shared]()
        for count in sorted({*_COUNTS, planned}):
            if count == planned:
                rows.append(self._row(self.config, self.fit, chosen))
                continue
            with suppress(CapacityError):
                rows.append(self._other(count, chosen.choice.width))
        return tuple(rows)

    def _other(self, count: int, width: int) -> Shared:
        """The best of some budgets for another number. Raises CapacityError."""
        budget = max(self.config.budget or 1, count) if self.opened.drafts.names else count
        config = replace(self.config, sequences=count, budget=budget, context=self.fit.context)
        chosen = self._best(config, self._laid_out(config), width)
        config = replace(config, budget=chosen.choice.budget, width=chosen.choice.width)
        fit = self._laid_out(config)
        if config.tree == "dynamic":
            costs, choice = self._costs(fit, chosen.choice.tokens_per_pass), chosen.choice
            chosen = outlook(self.calibration, costs, choice.budget, choice.width, count)
        return self._row(config, fit, chosen)

    def _laid_out(self, config: EngineConfig) -> Fit:
        """With the plan's draft, and caches in RAM only where the plan has them. Raises CapacityError."""
        fit = self.opened.fit(config, held=self.fit.held)
        if fit.placement.caches is Tier.HOST is not self.fit.placement.caches:
            raise CapacityError("caches of this size have no room on the device", needed=0, given=0)
        return fit

    def _best(self, config: EngineConfig, fit: Fit, width: int) -> Outlook:
        count, (most, largest), wanted = config.least_sequences, self.most, self.opened.config
        budgets = budgets_for(count, min(most, count * largest)) if self.opened.drafts.names else [count]
        budgets = [max(wanted.budget, count)] if wanted.budget else budgets
        costs = self._costs(fit, float(count))
        if config.tree == "sequoia" and self.opened.drafts.names:
            return best(static_sweep(self.calibration, costs, budgets, width, count))
        near = [wide for wide in WIDTHS if width / _APART <= wide <= width * _APART]
        widths = [width] if wanted.width or not near else near
        return best(sweep(self.calibration, costs, budgets, widths, count))

    def _costs(self, fit: Fit, walked: float) -> PassCosts:
        return self.pricing.costs(self.target, fit.placement, walked)

    def _row(self, config: EngineConfig, fit: Fit, found: Outlook) -> Shared:
        choice, count = found.choice, config.least_sequences
        costs = self._costs(fit, choice.tokens_per_pass).for_sequences(count)
        return Shared(
            sequences=count,
            budget=choice.budget,
            tok_per_s=choice.tok_per_s,
            tokens_per_pass=choice.tokens_per_pass,
            seconds_per_pass=choice.seconds_per_pass,
            link_seconds=float(costs.link_seconds(found.nodes)),
            caches=self.opened.cache_bytes(config, fit),
        )
