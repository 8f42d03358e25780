"""From what passes and draft steps were measured to take, to what any pass will."""

from dataclasses import dataclass, replace

from offspec_planners.cost import ModelSizes, PassCosts
from offspec_planners.hardware import Rate
from offspec_planners.json_fields import Points
from offspec_planners.placement import Placement, Tier
from offspec_planners.transfer import (
    cache_seconds,
    crossing_seconds,
    edge_layers,
    measured_links,
    streamed_units,
)


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

    def costs(self, target: ModelSizes, placement: Placement, walked: float) -> PassCosts:
        """The costs of passes under a placement, in which `walked` nodes are walked on average."""
        units = streamed_units(target.layers, target.head, placement)
        link, rest = 0.0, 0.0
        if units and self.link is not None:
            links = measured_links(units, placement, self.link.value)
            link, rest = crossing_seconds(units, placement, links)
            caches = cache_seconds(target.kv_per_token, self.prefix, placement, self.link.value)
            link, rest = link + caches, rest + caches
        head = target.head_weights / target.weights if placement.head is not Tier.DEVICE else 0.0
        edges = edge_layers(placement, target.layers, target.head, head)
        around = {rows: seconds + walked * self.walk for rows, seconds in self.outside}
        layer = [(rows, seconds + target.unpacked * self.unpack) for rows, seconds in self.layer]
        return PassCosts(
            compute=tuple(
                (rows, (len(target.layers) + head) * seconds + around[rows]) for rows, seconds in layer
            ),
            step=self.step or ((1, 0.0),),
            start=self.start,
            link=link,
            rest=rest,
            edge=tuple((rows, edges * seconds + around[rows]) for rows, seconds in layer),
        )

    def with_faster_link(self, factor: float) -> "MeasuredCosts":
        """These costs with bandwidth multiplied by a factor."""
        if self.link is None:
            return self
        return replace(self, link=self.link.times(factor))

    def with_packed_draft(self, bits: int) -> None:
        """Implements `Pricing`: nothing was measured of the draft but as it is held."""
