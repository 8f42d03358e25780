"""What would help most: the plan's speed on a machine or with files that are not quite these."""

from contextlib import suppress
from dataclasses import replace

from offspec.core.config import DraftBits, EngineConfig, format_bytes
from offspec.core.errors import CapacityError
from offspec.plan.beside import fastest_cpu_layers
from offspec.plan.fit import Fit, Opened
from offspec_planners.acceptance import Calibration
from offspec_planners.cost import ModelSizes, Pricing
from offspec_planners.placement import Tier
from offspec_planners.plan import WhatIf
from offspec_planners.search import Outlook, best, outlook, static_sweep, sweep

_FACTORS = (1.5, 2, 4)  # times the memory there is
_GAIN = 1.05  # times the speed; what brings less is not told
_DRAFT_BITS: DraftBits = 4
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

    def rows(self) -> tuple[WhatIf, ...]:
        """More memory, a faster link, fewer bits: what makes a difference. And no draft beside one."""
        rows = list[WhatIf]()
        if self._fit.placement.slots > 0:
            rows = [*self._memory(), self._link(), *self._packed(), *self._packed_draft(), *self._beside()]
        least = _GAIN * self._chosen.tok_per_s
        rows = [row for row in rows if row.tok_per_s is not None and row.tok_per_s >= least]
        if self._opened.drafts.names:
            rows.append(WhatIf("no draft", self._plain(), "one token a pass"))
        return tuple(rows)

    def _memory(self) -> list[WhatIf]:
        """More RAM, then more VRAM, each as far as more of it brings more."""
        opened = self._opened
        grown = [(replace(opened, memory=int(by * opened.memory)), "RAM") for by in _FACTORS]
        rows = self._places(grown)
        if opened.vram is not None:
            gpus, where = (opened.vram, *opened.more_vram), "VRAM on each GPU" if opened.more_vram else "VRAM"
            sizes = [[int(by * vram) for vram in gpus] for by in _FACTORS]
            grown = [(replace(opened, vram=first, more_vram=tuple(more)), where) for first, *more in sizes]
            rows += self._places(grown)
        return rows

    def _places(self, grown: list[tuple[Opened, str]]) -> list[WhatIf]:
        """A row for each of ever larger memories that brings more than the one before."""
        rows, before = list[WhatIf](), self._chosen.tok_per_s
        for larger, name in grown:
            with suppress(CapacityError):
                size = larger.memory if name == "RAM" else larger.vram or 0
                row = self._placed(larger, larger.fit(self._config), f"{format_bytes(size)} of {name}")
                if (row.tok_per_s or 0.0) >= _GAIN * before:
                    rows.append(row)
                    before = row.tok_per_s or 0.0
        return rows

    def _placed(self, larger: Opened, fit: Fit, change: str) -> WhatIf:
        placement = fit.placement
        kept, host = len(placement.resident), len(placement.layers(Tier.HOST))
        target = self._target.unpacked_once() if larger.unpacks(self._config, fit) else self._target
        where = f"{kept} of {len(placement.tiers)} layers stay on the device, {host} in RAM"
        if larger.vram is None:
            where = f"{kept} of {len(placement.tiers)} layers stay in it"
        return WhatIf(change, self._speed(fit=fit, target=target), where)

    def _link(self) -> WhatIf:
        """Bytes that come in half the time, whatever they come through."""
        placement = self._fit.placement
        ways = ["the disk"] if placement.layers(Tier.DISK) or placement.head is Tier.DISK else []
        ways += ["RAM to VRAM"] if self._opened.vram is not None else []
        speed = self._speed(pricing=self._pricing.with_faster_link(2.0))
        return WhatIf("a link twice as fast", speed, " and ".join(ways))

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

    def _packed_draft(self) -> list[WhatIf]:
        """A draft that is kept in 4 bits, which leaves room for layers; none where that cannot be priced."""
        pricing = self._pricing.with_packed_draft(_DRAFT_BITS)
        if pricing is None or self._opened.draft is None or self._fit.draft_mode == "packed":
            return []
        try:
            fit = self._opened.fit(self._config, held=("packed", _DRAFT_BITS))
        except CapacityError:
            return []
        kept = f"{len(fit.placement.resident)} of {len(fit.placement.tiers)} layers stay on the device"
        return [WhatIf(f"the draft kept in {_DRAFT_BITS} bits", self._speed(fit=fit, pricing=pricing), kept)]

    def _beside(self) -> list[WhatIf]:
        """Layers computed by the CPU, where that was left to be chosen and none is."""
        config = self._config
        if config.cpu_layers or self._fit.placement.layers(Tier.CPU):
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
