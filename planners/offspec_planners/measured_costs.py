"""From what passes and draft steps were measured to take, to what any pass will."""

from dataclasses import dataclass, replace

from offspec_planners.cost import ModelSizes, PassCosts, cpu_layer_seconds
from offspec_planners.hardware import Processor, Rate
from offspec_planners.json_fields import Points
from offspec_planners.placement import Placement, Tier
from offspec_planners.transfer import (
    Links,
    cache_seconds,
    edge_layers,
    measured_links,
    slowest_crossing,
    streamed_units,
)

_PREFIX = 128  # positions behind which passes are measured


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
        unpack: Seconds of making a value of a packed weight, used for a target that is packed where the
            measured one is not.
        prefix: Committed positions whose keys and values cross the link, where those live in RAM.
        contended: Whether other processes used the processors meanwhile.
        host: The CPU beside a device with memory of its own.
        cpu: (rows, seconds) of one layer that the CPU computes, at the rows of `layer`; empty where none ran,
            and `host` tells.
    """

    layer: Points
    outside: Points
    walk: float
    step: Points = ()
    start: float = 0.0
    link: Rate | None = None
    unpack: float = 0.0
    prefix: int = 0
    contended: bool = False
    host: Processor | None = None
    cpu: Points = ()

    @property
    def knows_cpu(self) -> bool:
        """Implements `Pricing`."""
        return self.host is not None or bool(self.cpu)

    def costs(self, target: ModelSizes, placement: Placement, walked: float) -> PassCosts:
        """The costs of passes under a placement, in which `walked` nodes are walked on average."""
        units = streamed_units(target.layers, target.head, placement)
        link, rest = 0.0, 0.0
        if units and self.link is not None:
            links = measured_links(units, placement, self.link.value)
            if links.copy is not None and placement.gpu_count > 1:  # it was measured over all of their links
                links = Links(links.read, links.copy / placement.gpu_count)
            link, rest = slowest_crossing(target.layers, target.head, placement, links)
            caches = cache_seconds(target.kv_per_token, self.prefix, placement, self.link.value)
            link, rest = link + caches, rest + caches
        head = target.head_weights / target.weights if placement.head is not Tier.DEVICE else 0.0
        around = {rows: seconds + walked * self.walk for rows, seconds in self.outside}
        on_cpu = len(placement.layers(Tier.CPU))
        compute, edge = list[tuple[int, float]](), list[tuple[int, float]]()
        for rows, measured in self.layer:
            layer = measured + target.unpacked * self.unpack
            cpu = self._cpu_seconds(target, rows, bool(units)) if on_cpu else layer
            layers = (len(target.layers) - on_cpu + head) * layer + on_cpu * cpu
            compute.append((rows, layers + around[rows]))
            edges = edge_layers(placement, target.layers, target.head, head, cpu / layer)
            edge.append((rows, edges * layer + around[rows]))
        return PassCosts(
            compute=tuple(compute),
            step=self.step or ((1, 0.0),),
            start=self.start,
            link=link,
            rest=rest,
            edge=tuple(edge),
        )

    def _cpu_seconds(self, target: ModelSizes, rows: int, streams: bool) -> float:
        """Seconds of a layer that the CPU computes: as such layers took, or by what is known of the CPU."""
        if found := dict(self.cpu).get(rows):
            return found
        assert self.host is not None, "nothing is known of the CPU"
        copied = self.link.value if self.link is not None and streams else 0.0
        return cpu_layer_seconds(self.host, target, rows, _PREFIX, copied)

    def with_faster_link(self, factor: float) -> "MeasuredCosts":
        """These costs with bandwidth multiplied by a factor."""
        if self.link is None:
            return self
        return replace(self, link=self.link.times(factor))

    def with_packed_draft(self, bits: int) -> None:
        """Implements `Pricing`: nothing was measured of the draft but as it is held."""
