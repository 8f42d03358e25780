"""Variants of a plan laid out in memory: other hardware, formats, drafts and numbers of sequences."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from offspec.core.config import DraftBits, EngineConfig
from offspec.plan.cpu_offload import choose_cpu_experts, choose_cpu_layers
from offspec.plan.fit import Fit, cache_bytes, find_fit, fits_unpacked, try_fit
from offspec.plan.opened import OpenedModels
from offspec_planners.acceptance import rounded
from offspec_planners.placement import Placement, Tier
from offspec_planners.plan.forecast import Shared, WhatIf
from offspec_planners.predictor import Predictor
from offspec_planners.search import SpeedForecast
from offspec_planners.shared_passes import LaidOut, SharedPasses
from offspec_planners.units import format_bytes, format_count
from offspec_planners.what_if import explain_memories, faster_rows, sequence_rows, undrafted_rows

_FACTORS = (1.5, 2, 4)  # multiples of the present memory
_DRAFT_BITS: DraftBits = 4
_NEARLY = (1.0, 1.05, 1.1, 1.15, 1.2, 1.25)  # multiple of the present memory: still little more
_OTHER_ANSWERS = "slightly different answers"
_OTHER_ROUNDING = f"in bfloat16 {_OTHER_ANSWERS}, since a CPU rounds differently"
_WHOLE = 12  # bits per weight from which a file counts as unpacked
_FORMATS = {"nf4": 4.25, "int8": 8.5}  # bits per weight made by `offspec pack`, including scales


@dataclass(frozen=True, slots=True)
class Variants:
    """Lays out variants of a plan whose settings are chosen.

    Args:
        opened: Models that memory is divided among.
        config: Settings of the plan.
        fit: Placement of the plan.
        predictor: Prices of the plan.
        chosen: Forecast of the plan.
    """

    opened: OpenedModels
    config: EngineConfig
    fit: Fit
    predictor: Predictor
    chosen: SpeedForecast

    def shared_passes(self, most: tuple[int, int]) -> tuple[Shared, ...]:
        """Return passes of other numbers of sequences. most: maximum nodes of a pass, and of one recorded
        tree.
        """
        planned, wanted = self._with_caches(self.config, self.fit), self.opened.config
        passes = SharedPasses(
            self.predictor, self.chosen, planned, self._lay_out, most, wanted.budget, wanted.width
        )
        return passes.rows()

    def what_ifs(self, shared: Iterable[Shared]) -> tuple[WhatIf, ...]:
        """Return the changes that make a difference: memory, links, bits, no draft, and numbers of sequences.

        shared: passes of other numbers of sequences.
        """
        choice, sequences, placement = self.chosen.choice, self.predictor.sequences, self.fit.placement
        rows = list[WhatIf]()
        if placement.slots > 0 or placement.on_demand_experts:
            rows = faster_rows(choice, self._ladders())
        if self.predictor.drafts:
            least = find_fit(self.opened.alone(), replace(self.config, budget=sequences, width=1))
            rows += undrafted_rows(choice, self.predictor.speed_without_draft(least.placement))
        return (*rows, *sequence_rows(choice, sequences, shared))

    def _lay_out(self, sequences: int, budget: int, width: int) -> LaidOut | None:
        """Lay out with the plan's draft and context, and with KV caches in RAM only if the plan has them
        there.
        """
        context = self.fit.context
        config = replace(self.config, sequences=sequences, budget=budget, width=width, context=context)
        found = try_fit(self.opened, config, draft_storage=self.fit.draft_storage)
        if found is None or found.placement.caches is Tier.HOST is not self.fit.placement.caches:
            return None
        return self._with_caches(config, found)

    def _with_caches(self, config: EngineConfig, fit: Fit) -> LaidOut:
        return fit.placement, cache_bytes(self.opened, config, fit)

    def _ladders(self) -> Iterator[Iterator[WhatIf]]:
        """Yield variants, in groups of increasing memory."""
        yield self._more_ram()
        yield self._more_vram()
        yield self._second_gpu()
        yield self._faster_link()
        if (stored := self.opened.target.stored_bits) >= _WHOLE:
            yield from (self._packed(name, bits, stored) for name, bits in _FORMATS.items())
        yield self._int8_cache()
        yield self._packed_draft()
        yield self._cpu_work()

    def _more_ram(self) -> Iterator[WhatIf]:
        for by in _FACTORS:
            larger = replace(self.opened, memory=int(by * self.opened.memory))
            yield from self._larger(larger, f"{format_bytes(larger.memory)} of RAM")

    def _more_vram(self) -> Iterator[WhatIf]:
        opened = self.opened
        where = "VRAM on each GPU" if opened.more_vram else "VRAM"
        for by in _FACTORS if opened.vram is not None else ():
            vram, *more = (int(by * size) for size in (opened.vram or 0, *opened.more_vram))
            larger = replace(opened, vram=vram, more_vram=tuple(more))
            yield from self._larger(larger, f"{format_bytes(vram)} of {where}")

    def _second_gpu(self) -> Iterator[WhatIf]:
        opened = self.opened
        if opened.vram is not None and not opened.more_vram and not self.fit.placement.on_demand_experts:
            note = "`--device all`, each with a link of its own; "
            yield from self._larger(replace(opened, more_vram=(opened.vram,)), "a second GPU like it", note)

    def _larger(self, larger: OpenedModels, change: str, note: str = "") -> Iterator[WhatIf]:
        """Yield more memory, if the plan's settings fit in it."""
        fit, predictor = try_fit(larger, self.config), self.predictor
        if fit is not None and fits_unpacked(larger, self.config, fit):
            predictor = replace(predictor, target=predictor.target.unpacked_once())
        yield from self._laid_out(change, note, fit, predictor)

    def _laid_out(self, change: str, note: str, fit: Fit | None, predictor: Predictor) -> Iterator[WhatIf]:
        """Yield a variant that fits, with its tiers noted."""
        if fit is not None:
            yield self._row(change, note + self._memories(fit.placement), fit.placement, predictor)

    def _row(self, change: str, note: str, placement: Placement, predictor: Predictor) -> WhatIf:
        return WhatIf(change, predictor.best_speed(placement, self.chosen.choice), note)

    def _memories(self, placement: Placement) -> str:
        return explain_memories(placement, self.predictor.target, vram=self.opened.vram is not None)

    def _faster_link(self) -> Iterator[WhatIf]:
        """Yield links of twice the speed."""
        placement = self.fit.placement
        missed = (
            placement.on_demand_experts and placement.host_expert_slots < self.opened.target.experts.count
        )
        from_disk = placement.layers(Tier.DISK) or placement.head is Tier.DISK or missed
        ways = ["the disk"] if from_disk else []
        ways += ["RAM to VRAM"] if self.opened.vram is not None else []
        faster = replace(self.predictor, pricing=self.predictor.pricing.with_faster_link(2.0))
        yield self._row("a link twice as fast", " and ".join(ways), placement, faster)

    def _packed(self, name: str, bits: float, stored: float) -> Iterator[WhatIf]:
        """Yield the target quantized, which then has to be unpacked."""
        share = bits / stored
        fit = try_fit(self.opened, self.config, share)
        if fit is None:
            return
        packed = replace(self.predictor, target=self.predictor.target.packed_in(bits, stored))
        note = f"`--quantize {name}`, {_OTHER_ANSWERS}; {self._room_for(fit, share)}"
        yield self._row(f"the target packed to {name}", note, fit.placement, packed)

    def _room_for(self, fit: Fit, share: float) -> str:
        """Return a note where layers of that share of their size are, or the little memory that would hold
        them all.
        """
        if not fit.placement.slots:
            return self._memories(fit.placement)
        spared = Tier.DISK if Tier.DISK in fit.placement.tiers else Tier.HOST
        least = replace(self.config, budget=1, width=1)
        choices = [(self.opened, self.config, "", by) for by in _NEARLY[1:]]
        choices += [(self.opened.alone(), least, " without a draft", by) for by in _NEARLY]
        for opened, config, without, by in choices:
            memory, vram = opened.memory, opened.vram
            if vram is None or spared is Tier.DISK:
                opened, size = replace(opened, memory=int(by * memory)), f"{format_bytes(by * memory)} of RAM"
            else:
                opened, size = replace(opened, vram=int(by * vram)), f"{format_bytes(by * vram)} of VRAM"
            larger = try_fit(opened, config, share)
            if larger is not None and spared not in larger.placement.tiers:
                held = "all layers" if spared is Tier.HOST or vram is None else "what VRAM does not"
                return f"nearly fits: {size} would hold {held}{without}"
        return self._memories(fit.placement)

    def _int8_cache(self) -> Iterator[WhatIf]:
        """Yield the int8 KV cache, which leaves room for layers."""
        if self.config.kv_cache == "int8":
            return
        narrow = self.opened.target.with_int8_cache()
        fit = try_fit(replace(self.opened, target=narrow), self.config)
        sizes = replace(self.predictor.target, kv_per_token=narrow.cache_bytes(1))
        note = f"`--kv-cache int8`, {_OTHER_ANSWERS}; "
        yield from self._laid_out("keys and values in int8", note, fit, replace(self.predictor, target=sizes))

    def _packed_draft(self) -> Iterator[WhatIf]:
        """Yield a 4-bit draft, which leaves room for layers; none if it has no price."""
        pricing = self.predictor.pricing.with_packed_draft(_DRAFT_BITS)
        if pricing is None or self.fit.draft_mode != "full":
            return
        fit = try_fit(self.opened, self.config, draft_storage=("packed", _DRAFT_BITS))
        known = rounded(self.predictor.calibration, _DRAFT_BITS)
        predictor = replace(self.predictor, pricing=pricing, calibration=known)
        change, note = f"the draft kept in {_DRAFT_BITS} bits", f"`--draft-bits {_DRAFT_BITS}`; "
        yield from self._laid_out(change, note, fit, predictor)

    def _cpu_work(self) -> Iterator[WhatIf]:
        """Yield experts or layers computed by the CPU, if the plan was free to choose them and chose none."""
        opened, config, predictor = self.opened, self.config, self.predictor
        if config.experts != "cpu" and choose_cpu_experts(opened, config, predictor, self.chosen):
            change, option = "experts computed by the CPU", "experts cpu"
            config = replace(config, experts="cpu")
        elif config.cpu_layers or self.fit.placement.layers(Tier.CPU):
            return
        elif layers := choose_cpu_layers(opened, config, predictor, self.chosen):
            change, option = f"{format_count(layers, 'layer')} computed by the CPU", f"cpu-layers {layers}"
            config = replace(config, cpu_layers=layers)
        else:
            return
        placement = find_fit(opened, config).placement
        yield self._row(change, f"`--{option}`, {_OTHER_ROUNDING}", placement, predictor)
