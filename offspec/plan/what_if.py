"""What would help most: the plan's speed on a machine or with files that are not quite these."""

from contextlib import suppress
from dataclasses import replace

from offspec.core.config import EngineConfig, format_bytes
from offspec.core.errors import CapacityError
from offspec.plan.beside import fastest_cpu_layers
from offspec.plan.fit import Fit, Opened
from offspec_planners.acceptance import Calibration
from offspec_planners.cost import ModelSizes, Pricing
from offspec_planners.placement import Tier
from offspec_planners.plan import WhatIf
from offspec_planners.search import Outlook, best, outlook, static_sweep, sweep

_FACTORS = (1.5, 2, 4)  # times the memory there is
_WHOLE = 12  # bits a weight, from which on a file is not taken for packed
_FORMATS = {"nf4": 4.25, "int8": 8.5}  # bits a weight of what `offspec pack` makes, scales included


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
        self._chosen, self._outlook = chosen.choice, chosen
        self._placed = fit.placement

    def rows(self) -> tuple[WhatIf, ...]:
        """More memory, a faster link, a packed target, no draft: what would make a difference."""
        streams = self._fit.placement.slots > 0
        rows = [WhatIf("no draft", self._plain(), "one token a pass")]
        if streams:
            rows = [
                *self._memory(),
                WhatIf("a link twice as fast", self._speed(pricing=self._pricing.with_faster_link(2.0)), ""),
                *self._packed(),
                *self._beside(),
                *rows,
            ]
        return tuple(rows)

    def _memory(self) -> list[WhatIf]:
        """More of each memory, until nothing streams."""
        opened, rows = self._opened, list[WhatIf]()
        for factor in _FACTORS:
            more = int(factor * opened.memory)
            rows += self._with(replace(opened, memory=more), f"{format_bytes(more)} of RAM")
            if opened.vram is not None:
                more = int(factor * opened.vram)
                others = tuple(int(factor * vram) for vram in opened.more_vram)
                change = f"{format_bytes(more)} of VRAM{' on each GPU' if others else ''}"
                rows += self._with(replace(opened, vram=more, more_vram=others), change)
        return rows

    def _with(self, larger: Opened, change: str) -> list[WhatIf]:
        """One row, or none where nothing would lie elsewhere."""
        try:
            fit = larger.fit(self._config)
        except CapacityError:
            return []
        placement = fit.placement
        if placement == self._placed:
            return []
        self._placed = placement
        kept, host = len(placement.resident), len(placement.layers(Tier.HOST))
        target = self._target.unpacked_once() if larger.unpacks(self._config, fit) else self._target
        where = f"{kept} of {len(placement.tiers)} layers stay on the device, {host} in RAM"
        if larger.vram is None:
            where = f"{kept} of {len(placement.tiers)} layers stay in it"
        return [WhatIf(change, self._speed(fit=fit, target=target), where)]

    def _packed(self) -> list[WhatIf]:
        """The target in fewer bits, which then have to be unpacked; none where it already is."""
        target = self._opened.target
        stored = 8 * sum(target.layer_bytes) / sum(target.layer_elements)
        if stored < _WHOLE:
            return []
        rows = list[WhatIf]()
        for name, bits in _FORMATS.items():
            with suppress(CapacityError):
                fit = self._opened.fit(self._config, bits / stored)
                speed = self._speed(fit=fit, target=self._target.packed_in(bits, stored))
                note = f"`offspec pack --to {name}`; another model, a little less exact"
                rows.append(WhatIf(f"the target packed to {name}", speed, note))
        return rows

    def _beside(self) -> list[WhatIf]:
        """Layers computed by the CPU, where that was left to be chosen and none is."""
        config = self._config
        if config.cpu_layers or self._placed.layers(Tier.CPU):
            return []
        layers = fastest_cpu_layers(self._opened, config, self._pricing, self._target, self._outlook)
        if not layers:
            return []
        fit = self._opened.fit(replace(config, cpu_layers=layers))
        change, speed = f"{layers} layers computed by the CPU", self._speed(fit=fit)
        note = f"`--cpu-layers {layers}`; in bfloat16 other answers, since a CPU rounds in another way"
        return [WhatIf(change, speed, note)]

    def _plain(self) -> float:
        alone = self._opened.alone().fit(replace(self._config, budget=1, width=1))
        costs = self._pricing.costs(self._target, alone.placement, 1.0)
        return outlook(self._calibration, costs, 1, 1).choice.tok_per_s

    def _speed(
        self, fit: Fit | None = None, target: ModelSizes | None = None, pricing: Pricing | None = None
    ) -> float:
        """Tokens per second with something changed, at the budget that then is best of a few."""
        costs = (pricing or self._pricing).costs(
            target or self._target, (fit or self._fit).placement, self._chosen.tokens_per_pass
        )
        budget = self._chosen.budget
        budgets = sorted({1, max(budget // 2, 1), budget, 2 * budget}) if self._opened.drafts.names else [1]
        width = self._chosen.width
        if self._config.tree == "sequoia" and self._opened.drafts.names:
            return best(static_sweep(self._calibration, costs, budgets, width)).choice.tok_per_s
        return best(sweep(self._calibration, costs, budgets, [width])).choice.tok_per_s
