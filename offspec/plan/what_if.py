"""What would help most: the plan's speed on a machine or with files that are not quite these."""

from contextlib import suppress
from dataclasses import replace

from offspec.core.config import DraftBits, EngineConfig, format_bytes
from offspec.core.errors import CapacityError
from offspec.plan.beside import cpu_experts_pay, fastest_cpu_layers
from offspec.plan.fit import Fit, Opened
from offspec_planners.acceptance import Calibration, rounded
from offspec_planners.cost import ModelSizes, Pricing
from offspec_planners.placement import Tier
from offspec_planners.plan import Shared, WhatIf
from offspec_planners.search import Outlook, best, outlook, static_sweep, sweep
from offspec_planners.units import format_number

_FACTORS = (1.5, 2, 4)  # times the memory there is
_GAIN = 1.05  # times the speed; what brings less is not told
_DRAFT_BITS: DraftBits = 4
_NEARLY = (1.0, 1.05, 1.1, 1.15, 1.2, 1.25)  # times the memory there is: still little more
_OTHER_ANSWERS = "slightly different answers"
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
        shared: tuple[Shared, ...] = (),
    ) -> None:
        self._opened, self._config, self._fit = opened, config, fit
        self._pricing, self._target, self._calibration = pricing, target, calibration
        self._chosen, self._outlook = chosen.choice, chosen
        self._shared, self._sequences = shared, config.least_sequences

    def rows(self) -> tuple[WhatIf, ...]:
        """More memory, a faster link, fewer bits: what makes a difference. And no draft beside one."""
        rows = list[WhatIf]()
        if self._fit.placement.slots > 0 or self._fit.placement.by_need:
            rows = [
                *self._memory(),
                *self._second_gpu(),
                self._link(),
                *self._packed(),
                *self._int8_cache(),
                *self._packed_draft(),
                *self._beside(),
            ]
        here = self._chosen.tok_per_s
        rows = [row for row in rows if row.tok_per_s is not None and row.tok_per_s >= _GAIN * here]
        if self._opened.drafts.names and not here < _GAIN * (alone := self._plain()) < _GAIN**2 * here:
            rows.append(WhatIf("no draft", alone, "one token a pass"))
        return (*rows, *self._other_sequences())

    def _other_sequences(self) -> list[WhatIf]:
        """One by itself, and more of them as far as more bring more."""
        rows, before = list[WhatIf](), self._chosen.tok_per_s
        for row in self._shared:
            more = row.sequences > self._sequences and row.tok_per_s >= _GAIN * before
            if row.sequences == 1:
                rows.append(WhatIf("with 1 sequence", row.tok_per_s, "while others wait"))
            elif more:
                note = f"{format_number(row.each)} tok/s each; caches of {format_bytes(row.caches)}"
                rows.append(WhatIf(f"with {row.sequences} sequences", row.tok_per_s, f"in all, {note}"))
                before = row.tok_per_s
        return rows

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

    def _placed(self, larger: Opened, fit: Fit, change: str, note: str = "") -> WhatIf:
        target = self._target.unpacked_once() if larger.unpacks(self._config, fit) else self._target
        return WhatIf(change, self._speed(fit=fit, target=target), note + self._kept(fit))

    def _kept(self, fit: Fit) -> str:
        """How many layers each memory has, or experts, in a clause."""
        tiers, experts = fit.placement.tiers, self._target.experts
        memory = "RAM" if self._opened.vram is None else "VRAM"
        if fit.placement.by_need and experts is not None:
            slots = {memory: fit.placement.expert_slots, "RAM": fit.placement.host_expert_slots}
            if self._opened.vram is None:
                slots = {memory: fit.placement.expert_slots}
            shares = {where: count / experts.every for where, count in slots.items() if count}
            return f"{' and '.join(f'{share:.0%} in {where}' for where, share in shares.items())} of experts"
        counts = {memory: tiers.count(Tier.DEVICE)}
        counts["RAM"] = counts.get("RAM", 0) + tiers.count(Tier.HOST) + tiers.count(Tier.CPU)
        first, *others = [(count, where) for where, count in counts.items() if count] or [(0, memory)]
        if first[0] == len(tiers):
            return f"all layers in {first[1]}"
        listing = [
            f"{first[0]} of {len(tiers)} layers in {first[1]}",
            *(f"{n} in {where}" for n, where in others),
        ]
        return ", ".join(listing)

    def _second_gpu(self) -> list[WhatIf]:
        """Where there is one."""
        opened = self._opened
        if opened.vram is None or opened.more_vram or self._fit.placement.by_need:
            return []
        two = replace(opened, more_vram=(opened.vram,))
        with suppress(CapacityError):
            note = "`--device all`, each with a link of its own; "
            return [self._placed(two, two.fit(self._config), "a second GPU like it", note)]
        return []

    def _link(self) -> WhatIf:
        """Bytes that come in half the time, whatever they come through."""
        placement = self._fit.placement
        missed = placement.by_need and placement.host_expert_slots < self._opened.target.experts.count
        from_disk = placement.layers(Tier.DISK) or placement.head is Tier.DISK or missed
        ways = ["the disk"] if from_disk else []
        ways += ["RAM to VRAM"] if self._opened.vram is not None else []
        speed = self._speed(pricing=self._pricing.with_faster_link(2.0))
        return WhatIf("a link twice as fast", speed, " and ".join(ways))

    def _packed(self) -> list[WhatIf]:
        """The target in fewer bits, which then have to be unpacked; none where it already is."""
        target = self._opened.target
        stored = target.stored_bits
        if stored < _WHOLE:
            return []
        rows = list[WhatIf]()
        for name, bits in _FORMATS.items():
            with suppress(CapacityError):
                fit = self._opened.fit(self._config, bits / stored)
                speed = self._speed(fit=fit, target=self._target.packed_in(bits, stored))
                note = f"`--quantize {name}`, {_OTHER_ANSWERS}; {self._room_for(fit, bits / stored)}"
                rows.append(WhatIf(f"the target packed to {name}", speed, note))
        return rows

    def _room_for(self, fit: Fit, share: float) -> str:
        """Where layers of that share of their size lie, or how little more would hold all of them."""
        if not fit.placement.slots:
            return self._kept(fit)
        spared = Tier.DISK if Tier.DISK in fit.placement.tiers else Tier.HOST
        least = replace(self._config, budget=1, width=1)
        choices = [(self._opened, self._config, "", by) for by in _NEARLY[1:]]
        choices += [(self._opened.alone(), least, " without a draft", by) for by in _NEARLY]
        for opened, config, without, by in choices:
            memory, vram = opened.memory, opened.vram
            if vram is None or spared is Tier.DISK:
                opened, size = replace(opened, memory=int(by * memory)), f"{format_bytes(by * memory)} of RAM"
            else:
                opened, size = replace(opened, vram=int(by * vram)), f"{format_bytes(by * vram)} of VRAM"
            with suppress(CapacityError):
                if spared not in opened.fit(config, share).placement.tiers:
                    held = "all layers" if spared is Tier.HOST or vram is None else "what VRAM does not"
                    return f"nearly fits: {size} would hold {held}{without}"
        return self._kept(fit)

    def _int8_cache(self) -> list[WhatIf]:
        """Keys and values in 8 bits, which leave room for layers."""
        if self._config.kv_cache == "int8":
            return []
        narrow = self._opened.target.with_int8_cache()
        opened = replace(self._opened, target=narrow)
        target = replace(self._target, kv_per_token=narrow.cache_bytes(1))
        with suppress(CapacityError):
            fit = opened.fit(self._config)
            note = f"`--kv-cache int8`, {_OTHER_ANSWERS}; {self._kept(fit)}"
            return [WhatIf("keys and values in int8", self._speed(fit=fit, target=target), note)]
        return []

    def _packed_draft(self) -> list[WhatIf]:
        """A draft that is kept in 4 bits, which leaves room for layers; none where that cannot be priced."""
        pricing = self._pricing.with_packed_draft(_DRAFT_BITS)
        if pricing is None or self._fit.draft_mode != "full":
            return []
        with suppress(CapacityError):
            fit = self._opened.fit(self._config, held=("packed", _DRAFT_BITS))
            speed = self._speed(fit=fit, pricing=pricing, known=rounded(self._calibration, _DRAFT_BITS))
            note = f"`--draft-bits {_DRAFT_BITS}`; {self._kept(fit)}"
            return [WhatIf(f"the draft kept in {_DRAFT_BITS} bits", speed, note)]
        return []

    def _beside(self) -> list[WhatIf]:
        """Layers computed by the CPU, where that was left to be chosen and none is."""
        config = self._config
        if config.experts != "cpu" and cpu_experts_pay(
            self._opened, config, self._pricing, self._target, self._outlook
        ):
            fit = self._opened.fit(replace(config, experts="cpu"))
            note = f"`--experts cpu`, in bfloat16 {_OTHER_ANSWERS}, since a CPU rounds in another way"
            return [WhatIf("experts computed by the CPU", self._speed(fit=fit), note)]
        if config.cpu_layers or self._fit.placement.layers(Tier.CPU):
            return []
        layers = fastest_cpu_layers(self._opened, config, self._pricing, self._target, self._outlook)
        if not layers:
            return []
        fit = self._opened.fit(replace(config, cpu_layers=layers))
        plural = "layer" if layers == 1 else "layers"
        change, speed = f"{layers} {plural} computed by the CPU", self._speed(fit=fit)
        note = f"`--cpu-layers {layers}`, in bfloat16 {_OTHER_ANSWERS}, since a CPU rounds in another way"
        return [WhatIf(change, speed, note)]

    def _plain(self) -> float:
        alone = self._opened.alone().fit(replace(self._config, budget=self._sequences, width=1))
        costs = self._pricing.costs(self._target, alone.placement, 1.0)
        return outlook(self._calibration, costs, self._sequences, 1, self._sequences).choice.tok_per_s

    def _speed(
        self,
        fit: Fit | None = None,
        target: ModelSizes | None = None,
        pricing: Pricing | None = None,
        known: Calibration | None = None,
    ) -> float:
        """Tokens per second with something changed, at the budget that then is best of a few."""
        known = known or self._calibration
        costs = (pricing or self._pricing).costs(
            target or self._target, (fit or self._fit).placement, self._chosen.tokens_per_pass
        )
        budget, least = self._chosen.budget, self._sequences
        budgets = sorted({least, max(budget // 2, least), budget, 2 * budget})
        budgets = budgets if self._opened.drafts.names else [least]
        width = self._chosen.width
        if self._config.tree == "sequoia" and self._opened.drafts.names:
            return best(static_sweep(known, costs, budgets, width, least)).choice.tok_per_s
        return best(sweep(known, costs, budgets, [width], least)).choice.tok_per_s
