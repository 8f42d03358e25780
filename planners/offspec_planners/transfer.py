"""Transfer of weights over links into ring buffer slots, and its part that cannot overlap drafting.

During drafting, the link continues until all slots are full, and is then idle. It resumes when the pass
releases its first unit. From there to the end of the pass takes at least the time to transfer the units that
did not fit, plus the time to compute the first and the last one: `rest` and `edge`. The formulas are paths
through the events of `offspec.stream`, each a lower bound; tests compare the largest of them with a
simulation of all events.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offspec_planners.expert_costs import ExpertSizes
from offspec_planners.placement import Placement, Tier


class Unit(NamedTuple):
    """A unit that fills one slot, a layer or a block of the head: its bytes and its tier."""

    size: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class Links:
    """Bytes per second from disk, and from RAM to a device; copy is None if units are read into slots."""

    read: float
    copy: float | None = None


def streamed_units(
    layers: Sequence[int], head: int, placement: Placement, gpu: int | None = None
) -> list[Unit]:
    """Return the units that stream, in the order of a pass.

    Args:
        layers: Bytes of each layer.
        head: Bytes of the output head.
        placement: Placement of the units.
        gpu: GPU that they stream to, if there are several; all by default.
    """
    units = [
        Unit(layers[layer], tier)
        for layer, tier in enumerate(placement.tiers)
        if tier.streams and gpu in (None, placement.gpu_of(layer))
    ]
    if placement.head.streams and not gpu:
        units += [Unit(size, placement.head) for size in _blocks(head, max(layers))]
    return units


def _blocks(head: int, most: int) -> list[int]:
    """Split the head into blocks as large as the largest layer, and one with the remainder."""
    whole, left = divmod(head, most)
    return [most] * whole + ([left] if left else [])


def slowest_transfer_seconds(
    layers: Sequence[int], head: int, placement: Placement, links: Links
) -> tuple[float, float]:
    """Return `crossing_seconds` of the slowest GPU: each has its own link, and all share the disk.

    Args:
        layers: Bytes of each layer.
        head: Bytes of the output head.
        placement: Placement of the units.
        links: Bytes per second from disk, and from RAM to each device.
    """
    count = placement.gpu_count
    own = Links(links.read / count, links.copy)
    each = (streamed_units(layers, head, placement, gpu) for gpu in range(count))
    found = [transfer_seconds(units, placement, own) for units in each if units]
    return max((link for link, _ in found), default=0.0), max((rest for _, rest in found), default=0.0)


def transfer_seconds(units: Sequence[Unit], placement: Placement, links: Links) -> tuple[float, float]:
    """Return (link, rest): seconds to transfer all units over the slowest link, and the part left in a pass.

    `rest` begins when the rings are full and the first slot is released, and ends when the last unit has
    arrived.

    Args:
        units: Units listed by `streamed_units`.
        placement: Placement of the units, and the rings.
        links: Bytes per second from disk and to the device.
    """
    near = [unit.size / (links.copy or links.read) for unit in units]
    rest = sum(near[placement.slots :])
    if links.copy is None:
        return sum(near), rest
    read = [unit.size / links.read if unit.tier is Tier.DISK else 0.0 for unit in units]
    late = [place for place, seconds in enumerate(read) if seconds and place >= placement.slots]
    if len(late) > placement.staging:
        # Copies continue up to the first unit in staging. Its slot is then refilled from disk, and after the
        # last unit has been read, that unit and the staged ones after it must still be copied.
        reading = sum(read[place] for place in late[placement.staging :])
        rest = max(rest, sum(near[placement.slots : late[0] + 1]) + reading + sum(near[late[-1] :]))
    return max(sum(near), sum(read)), rest


def cache_seconds(position: int, positions: int, placement: Placement, rate: float) -> float:
    """Return seconds to transfer KV caches in RAM over the link in every pass; 0 if they are elsewhere.

    Args:
        position: Bytes of one position, over all layers.
        positions: Number of committed positions.
        placement: Placement of the caches.
        rate: Bytes per second.
    """
    return position * positions / rate if placement.caches is Tier.HOST else 0.0


def expert_sources(
    experts: ExpertSizes, placement: Placement, links: Links
) -> tuple[tuple[float, float], ...]:
    """Return (share, seconds) of the links used by on-demand experts; see `ExpertCosts`.

    Args:
        experts: Sizes of the experts.
        placement: Number of expert slots in each memory.
        links: Bytes per second from disk and to the device.
    """
    near = min(placement.expert_slots / experts.every, 1.0)
    host = min(placement.host_expert_slots / experts.every, 1.0)
    if links.copy is None or placement.cpu_experts:
        return ((max(near, host), experts.nbytes / links.read),)
    # Experts on the device are in RAM as well.
    return (near, experts.nbytes / links.copy), (max(near, host), experts.nbytes / links.read)


def measured_links(units: Sequence[Unit], placement: Placement, rate: float) -> Links:
    """Return the links that explain a measured overall rate of units.

    If some units come from disk to a device, reading is assumed to be the bottleneck for all.
    """
    if placement.staging == 0:
        return Links(rate) if Tier.HOST not in {unit.tier for unit in units} else Links(math.inf, rate)
    total = sum(unit.size for unit in units)
    return Links(rate * sum(unit.size for unit in units if unit.tier is Tier.DISK) / total, math.inf)


def exposed_layers(
    placement: Placement, layers: Sequence[int], head: int, head_layers: float, cpu: float = 1.0
) -> float:
    """Return the number of layers computed before the first transfer, and from the last one on, both
    included.

    No transfer overlaps them if the rings are full when a pass begins.

    Args:
        placement: Placement of the layers.
        layers: Bytes of each layer.
        head: Bytes of the output head.
        head_layers: Weight of the head, in layers, if it streams.
        cpu: Weight of a layer computed by the CPU, in layers.
    """
    streamed = [index for index, tier in enumerate(placement.tiers) if tier.streams]
    counts = [cpu if tier is Tier.CPU else 1.0 for tier in placement.tiers]
    every = sum(counts)
    if not placement.head.streams:
        if not streamed or streamed[0] == streamed[-1]:
            return every
        return sum(counts[: streamed[0] + 1]) + sum(counts[streamed[-1] :])
    blocks = _blocks(head, max(layers))
    before = sum(counts[: streamed[0] + 1]) if streamed else every + head_layers * blocks[0] / head
    return min(before + head_layers * blocks[-1] / head, every + head_layers)
