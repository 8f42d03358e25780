"""What would help most: the plan's speed on a machine or with files that are not quite these."""

from dataclasses import replace

from offspec.assemble import Opened
from offspec.config import EngineConfig, format_bytes
from offspec.errors import CapacityError
from offspec.fit import Fit
from offspec_planners.calibrate import Calibration
from offspec_planners.cost import ModelSizes, Pricing
from offspec_planners.plan import WhatIf
from offspec_planners.search import Outlook, best, outlook, sweep

_QUARTER = 0.28  # bytes of a 4-bit format over those of 16 bits, its scales included


class WhatIfs:
    """Works out other speeds for one plan: its settings, what fits where, and what it is priced by."""

    def __init__(
        self,
        opened: Opened,
        config: EngineConfig,
        fit: Fit,
        pricing: Pricing,
        target: ModelSizes,
        calibration: Calibration,
        chosen: Outlook,
    ) -> None:
        self._opened, self._config, self._fit = opened, config, fit
        self._pricing, self._target, self._calibration = pricing, target, calibration
        self._chosen = chosen.choice

    def rows(self) -> tuple[WhatIf, ...]:
        """More memory, a faster link, a smaller format, no draft. Empty rows are left out."""
        streams = self._fit.placement.slots > 0
        rows = [WhatIf("no draft", self._plain(), "one token a pass")]
        if streams:
            rows = [
                *self._memory(),
                WhatIf("a link twice as fast", self._speed(pricing=self._pricing.with_faster_link(2.0)), ""),
                WhatIf("the target in 4 bits", self._smaller(), "where such a file can be streamed"),
                *rows,
            ]
        return tuple(rows)

    def _memory(self) -> list[WhatIf]:
        """More of the memory that is computed from, until nothing streams."""
        opened, rows = self._opened, list[WhatIf]()
        name, given = ("RAM", opened.memory) if opened.vram is None else ("VRAM", opened.vram)
        for factor in (1.5, 2, 3, 4):
            more = int(given * factor)
            larger = replace(opened, memory=more) if opened.vram is None else replace(opened, vram=more)
            try:
                fit = larger.fit(self._config)
            except CapacityError:
                continue
            kept = len(fit.placement.resident)
            rows.append(
                WhatIf(
                    f"{format_bytes(more)} of {name}",
                    self._speed(fit=fit),
                    f"{kept} of {len(fit.placement.tiers)} layers stay in it",
                )
            )
            if not fit.placement.slots:
                break
        return rows

    def _smaller(self) -> float:
        layers = tuple(int(size * _QUARTER) for size in self._target.layers)
        return self._speed(
            target=replace(self._target, layers=layers, head=int(self._target.head * _QUARTER))
        )

    def _plain(self) -> float:
        costs = self._pricing.costs(self._target, self._fit.placement, 1.0)
        return outlook(self._calibration, costs, 1, 1).choice.tok_per_s

    def _speed(
        self, fit: Fit | None = None, target: ModelSizes | None = None, pricing: Pricing | None = None
    ) -> float:
        """Tokens per second with something changed, at the budget that then is best of a few."""
        costs = (pricing or self._pricing).costs(
            target or self._target, (fit or self._fit).placement, self._chosen.tokens_per_pass
        )
        budget = self._chosen.budget
        budgets = sorted({1, max(budget // 2, 1), budget, 2 * budget}) if self._opened.draft else [1]
        return best(sweep(self._calibration, costs, budgets, [self._chosen.width])).choice.tok_per_s
