"""Costs of any pass, from measured times of passes and draft steps."""

from dataclasses import dataclass, replace

from offspec_planners.cost import ModelSizes, PassCosts, cpu_layer_seconds, expert_layer_seconds
from offspec_planners.expert_costs import ExpertCosts, ExpertUse
from offspec_planners.hardware_rates import Processor, Rate
from offspec_planners.json_fields import Points
from offspec_planners.placement import Placement, Tier
from offspec_planners.transfer import (
    Links,
    cache_seconds,
    expert_sources,
    exposed_layers,
    measured_links,
    slowest_transfer_seconds,
    streamed_units,
)

_PREFIX = 512  # committed positions of measured passes


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Seconds of a loaded model's parts, measured on the machine.

    Args:
        layer: (rows, seconds) of one layer with its weights in place.
        outside: (rows, seconds) of a pass outside its layers.
        walk: Seconds of choosing a token at one node, including the head if it is resident.
        step: (width, seconds) of a draft step.
        start: Further seconds of the draft's first step.
        link: Bytes per second received while the link was busy; None if nothing streams.
        gpus: Number of GPUs that received them, each over its own link.
        unpack: Seconds to dequantize one value, for a target that is quantized if the measured one is not.
        prefix: Committed positions whose KV cache crosses the link, if it is in RAM.
        contended: Whether other processes used the processors during the measurement.
        host: CPU next to a device with memory of its own.
        cpu: (rows, seconds) of one layer computed by the CPU, at the rows of `layer`; empty if none was
            measured, in which case `host` is used.
        disk: Bytes per second at which on-demand experts are read from disk; None without any.
        copy: Bytes per second at which on-demand experts are copied from RAM to a device; None without any.
        use: Expert usage learned in earlier passes.
        cpu_experts: Whether the CPU computed the experts of the measured layers.
        hidden: Share of a draft's seconds that can overlap a pass; see `PassCosts`.
    """

    layer: Points
    outside: Points
    walk: float
    step: Points = ()
    start: float = 0.0
    link: Rate | None = None
    gpus: int = 1
    unpack: float = 0.0
    prefix: int = 0
    contended: bool = False
    host: Processor | None = None
    cpu: Points = ()
    disk: Rate | None = None
    copy: Rate | None = None
    use: ExpertUse | None = None
    cpu_experts: bool = False
    hidden: float = 0.0

    @property
    def knows_cpu(self) -> bool:
        """Implements `Pricing`."""
        return self.host is not None or bool(self.cpu)

    def costs(self, target: ModelSizes, placement: Placement, walked: float) -> PassCosts:
        """Return the costs of passes under a placement in which `walked` nodes are walked on average."""
        streamed = target.streamed_with(placement)
        units = streamed_units(streamed, target.head, placement)
        link, rest, caches = 0.0, 0.0, 0.0
        if units and self.link is not None:
            links = measured_links(units, placement, self.link.value)
            if links.copy is not None:
                links = Links(links.read, links.copy / self.gpus)
            link, rest = slowest_transfer_seconds(streamed, target.head, placement, links)
            caches = cache_seconds(target.kv_per_token, self.prefix, placement, self.link.value)
            link, rest = link + caches, rest + caches
        head = target.head_weights / target.weights if placement.head is not Tier.DEVICE else 0.0
        around = {rows: seconds + walked * self.walk for rows, seconds in self.outside}
        on_cpu = len(placement.layers(Tier.CPU))
        compute, edge = list[tuple[int, float]](), list[tuple[int, float]]()
        for rows, measured in self.layer:
            layer = self._with_experts(target, placement, rows, measured) + target.unpacked * self.unpack
            cpu = self._cpu_seconds(target, rows, bool(units)) if on_cpu else layer
            layers = (len(target.layers) - on_cpu + head) * layer + on_cpu * cpu
            compute.append((rows, layers + around[rows]))
            edges = exposed_layers(placement, streamed, target.head, head, cpu / layer)
            edge.append((rows, edges * layer + around[rows]))
        return PassCosts(
            compute=tuple(compute),
            step=self.step or ((1, 0.0),),
            start=self.start,
            link=link,
            rest=rest,
            edge=tuple(edge),
            experts=self._experts(target, placement),
            caches=caches,
            hidden=self.hidden,
        )

    def _experts(self, target: ModelSizes, placement: Placement) -> ExpertCosts | None:
        """Return the costs of on-demand experts; None without any."""
        experts = target.experts
        if experts is None or not placement.on_demand_experts or self.disk is None:
            return None
        seconds = [
            (rows, len(target.layers) * self._of_experts(target, placement.cpu_experts, rows, layer))
            for rows, layer in self.layer
        ]
        links = Links(self.disk.value, None if self.copy is None else self.copy.value)
        sources = expert_sources(experts, placement, links)
        costs = ExpertCosts(len(experts.layers), experts.count, experts.chosen, sources, tuple(seconds))
        return costs if self.use is None else self.use.applied(costs)

    def _of_experts(self, target: ModelSizes, cpu: bool, rows: int, layer: float) -> float:
        """Return seconds of an average layer's experts, given `layer` measured seconds for the whole layer.

        If one processor computes everything, experts get their share of the layer's weights; experts on the
        CPU next to a device are priced from the CPU's profile.
        """
        experts = target.experts
        assert experts is not None
        if not cpu:
            met = float(experts.distinct_experts(rows)) * experts.weights * len(experts.layers)
            return layer * met / (met + target.dense_weights * len(target.layers))
        assert self.host is not None, "the CPU was not measured"
        share = len(experts.layers) / len(target.layers)
        told = share * expert_layer_seconds(self.host, target, rows, self.host)
        return min(told, layer) if self.cpu_experts else told

    def _with_experts(self, target: ModelSizes, placement: Placement, rows: int, layer: float) -> float:
        """Return seconds of a layer with its experts computed as the placement says."""
        if self.cpu_experts or not placement.cpu_experts or target.experts is None:
            return layer
        here, there = (self._of_experts(target, cpu, rows, layer) for cpu in (False, True))
        return layer - here + there

    def _cpu_seconds(self, target: ModelSizes, rows: int, streams: bool) -> float:
        """Return seconds of a layer computed by the CPU: as measured, or estimated from the CPU's profile."""
        if found := dict(self.cpu).get(rows):
            return found
        assert self.host is not None, "the CPU was not measured"
        copied = self.link.value if self.link is not None and streams else 0.0
        return cpu_layer_seconds(self.host, target, rows, _PREFIX, copied)

    def with_faster_link(self, factor: float) -> "MeasuredCosts":
        """Return these costs with bandwidth multiplied by a factor."""
        link, disk, copy = (rate and rate.times(factor) for rate in (self.link, self.disk, self.copy))
        return replace(self, link=link, disk=disk, copy=copy)

    def with_packed_draft(self, bits: int) -> None:
        """Implement `Pricing`: the draft was measured only in its current form."""
