"""From what passes and draft steps were measured to take, to what any pass will."""

from dataclasses import dataclass, replace

from offspec_planners.cost import ModelSizes, PassCosts, cpu_layer_seconds, expert_layer_seconds
from offspec_planners.expert_costs import ExpertCosts, ExpertUse
from offspec_planners.hardware_rates import Processor, Rate
from offspec_planners.json_fields import Points
from offspec_planners.placement import Placement, Tier
from offspec_planners.transfer import (
    Links,
    cache_seconds,
    edge_layers,
    expert_sources,
    measured_links,
    slowest_crossing,
    streamed_units,
)

_PREFIX = 512  # positions behind which passes are measured


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Seconds of a loaded model's parts, measured on the machine.

    Args:
        layer: (rows, seconds) of one layer with its weights in place.
        outside: (rows, seconds) of a pass around its layers.
        walk: Seconds of choosing a token at one node, the head included where it stays.
        step: (width, seconds) of a draft step.
        start: Further seconds of the draft's first step.
        link: Bytes per second that came while the link was busy; None where nothing streams.
        gpus: GPUs to which those came, over a link each.
        unpack: Seconds of making a value of a packed weight, used for a target that is packed where the
            measured one is not.
        prefix: Committed positions whose keys and values cross the link, where those live in RAM.
        contended: Whether other processes used the processors meanwhile.
        host: The CPU beside a device with memory of its own.
        cpu: (rows, seconds) of one layer that the CPU computes, at the rows of `layer`; empty where none ran,
            and `host` tells.
        disk: Bytes per second at which experts come from disk that are reached by need; None where none are.
        copy: The same from RAM to a device.
        use: What earlier passes told of how experts are asked for.
        cpu_experts: Whether the CPU computed the experts of the layers that were measured.
        hidden: Share of a draft's seconds that can go on beside a pass; see `PassCosts`.
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
        """The costs of passes under a placement, in which `walked` nodes are walked on average."""
        streamed = target.streamed_with(placement)
        units = streamed_units(streamed, target.head, placement)
        link, rest, caches = 0.0, 0.0, 0.0
        if units and self.link is not None:
            links = measured_links(units, placement, self.link.value)
            if links.copy is not None:
                links = Links(links.read, links.copy / self.gpus)
            link, rest = slowest_crossing(streamed, target.head, placement, links)
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
            edges = edge_layers(placement, streamed, target.head, head, cpu / layer)
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
        """Of experts that come by need; None where none do."""
        experts = target.experts
        if experts is None or not placement.by_need or self.disk is None:
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
        """Seconds of the experts of a layer of average size, of which a layer was measured to take `layer`.

        Where one processor computes all, they are taken to be their share of the weights that it meets; those
        of the CPU beside a device go by what is known of it.
        """
        experts = target.experts
        assert experts is not None
        if not cpu:
            met = float(experts.union(rows)) * experts.weights * len(experts.layers)
            return layer * met / (met + target.dense_weights * len(target.layers))
        assert self.host is not None, "nothing is known of the CPU"
        share = len(experts.layers) / len(target.layers)
        told = share * expert_layer_seconds(self.host, target, rows, self.host)
        return min(told, layer) if self.cpu_experts else told

    def _with_experts(self, target: ModelSizes, placement: Placement, rows: int, layer: float) -> float:
        """Seconds of a layer whose experts are computed where a placement says."""
        if self.cpu_experts or not placement.cpu_experts or target.experts is None:
            return layer
        here, there = (self._of_experts(target, cpu, rows, layer) for cpu in (False, True))
        return layer - here + there

    def _cpu_seconds(self, target: ModelSizes, rows: int, streams: bool) -> float:
        """Seconds of a layer that the CPU computes: as such layers took, or by what is known of the CPU."""
        if found := dict(self.cpu).get(rows):
            return found
        assert self.host is not None, "nothing is known of the CPU"
        copied = self.link.value if self.link is not None and streams else 0.0
        return cpu_layer_seconds(self.host, target, rows, _PREFIX, copied)

    def with_faster_link(self, factor: float) -> "MeasuredCosts":
        """These costs with bandwidth multiplied by a factor."""
        link, disk, copy = (rate and rate.times(factor) for rate in (self.link, self.disk, self.copy))
        return replace(self, link=link, disk=disk, copy=copy)

    def with_packed_draft(self, bits: int) -> None:
        """Implements `Pricing`: nothing was measured of the draft but as it is held."""
