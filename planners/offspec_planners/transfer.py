"""How weights cross links into rings of slots, and what of that cannot hide behind the draft.

While the draft works, the link goes on until all slots are full, and then stands still. It goes on when the
pass releases its first unit. From there to the end of the pass takes at least as long as the units that did
not fit take to come, and the first and the last one to be computed with: `rest` and `edge`. The formulas are
paths through the events of `offspec.stream`, each a bound from below; the tests hold the largest of them
against a simulation of all events.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offspec_planners.expert_costs import ExpertSizes
from offspec_planners.placement import Placement, Tier


class Unit(NamedTuple):
    """What comes into a slot at a time, a layer or a block of the head: its bytes, and the tier it is in."""

    size: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class Links:
    """Bytes per second from disk, and from RAM to a device; copy is None where units are read into slots."""

    read: float
    copy: float | None = None


def streamed_units(
    layers: Sequence[int], head: int, placement: Placement, gpu: int | None = None
) -> list[Unit]:
    """The units that stream, in the order of a pass.

    Args:
        layers: Bytes of each layer.
        head: Bytes of the output head.
        placement: Where they are.
        gpu: Of several, the one they stream to; all by default.
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
    """The head in blocks as large as the largest layer, and one with what is left."""
    whole, left = divmod(head, most)
    return [most] * whole + ([left] if left else [])


def slowest_crossing(
    layers: Sequence[int], head: int, placement: Placement, links: Links
) -> tuple[float, float]:
    """`crossing_seconds` to the GPU where it takes longest: each has a link, and they share the disk.

    Args:
        layers: Bytes of each layer.
        head: Bytes of the output head.
        placement: Where they are.
        links: Bytes per second from disk, and from RAM to each device.
    """
    count = placement.gpu_count
    own = Links(links.read / count, links.copy)
    each = (streamed_units(layers, head, placement, gpu) for gpu in range(count))
    found = [crossing_seconds(units, placement, own) for units in each if units]
    return max((link for link, _ in found), default=0.0), max((rest for _, rest in found), default=0.0)


def crossing_seconds(units: Sequence[Unit], placement: Placement, links: Links) -> tuple[float, float]:
    """(link, rest): seconds in which all units cross the slowest link, and what is left of them in a pass.

    `rest` counts from when the rings are full and the first slot is released up to the arrival of the last
    unit.

    Args:
        units: As `streamed_units` lists them.
        placement: Where they are, and the rings.
        links: Bytes per second from disk and to the device.
    """
    near = [unit.size / (links.copy or links.read) for unit in units]
    rest = sum(near[placement.slots :])
    if links.copy is None:
        return sum(near), rest
    read = [unit.size / links.read if unit.tier is Tier.DISK else 0.0 for unit in units]
    late = [place for place, seconds in enumerate(read) if seconds and place >= placement.slots]
    if len(late) > placement.staging:
        # Copies go on as far as the first unit in staging. Its slot is then read into again, and when the
        # last unit has been read, that one and what stands behind it are still to be copied.
        reading = sum(read[place] for place in late[placement.staging :])
        rest = max(rest, sum(near[placement.slots : late[0] + 1]) + reading + sum(near[late[-1] :]))
    return max(sum(near), sum(read)), rest


def cache_seconds(position: int, positions: int, placement: Placement, rate: float) -> float:
    """Seconds in which keys and values that live in RAM cross the link in every pass; 0 where they do not.

    Args:
        position: Bytes of one position, over all layers.
        positions: That are committed.
        placement: Where they live.
        rate: Bytes per second.
    """
    return position * positions / rate if placement.caches is Tier.HOST else 0.0


def expert_sources(
    experts: ExpertSizes, placement: Placement, links: Links
) -> tuple[tuple[float, float], ...]:
    """(share, seconds) of the links that experts come through by need; see `ExpertCosts`.

    Args:
        experts: Their sizes.
        placement: How many of them each memory has room for.
        links: Bytes per second from disk and to the device.
    """
    near = min(placement.expert_slots / experts.every, 1.0)
    host = min(placement.host_expert_slots / experts.every, 1.0)
    if links.copy is None or placement.cpu_experts:
        return ((max(near, host), experts.nbytes / links.read),)
    # Those on the device are in RAM as well.
    return (near, experts.nbytes / links.copy), (max(near, host), experts.nbytes / links.read)


def measured_links(units: Sequence[Unit], placement: Placement, rate: float) -> Links:
    """The links behind a measured rate at which units came, all in all.

    Where some of them come from disk to a device, reading is taken to be what the others waited for.
    """
    if placement.staging == 0:
        return Links(rate) if Tier.HOST not in {unit.tier for unit in units} else Links(math.inf, rate)
    total = sum(unit.size for unit in units)
    return Links(rate * sum(unit.size for unit in units if unit.tier is Tier.DISK) / total, math.inf)


def edge_layers(
    placement: Placement, layers: Sequence[int], head: int, head_layers: float, cpu: float = 1.0
) -> float:
    """Layers that are computed up to the first unit that streams, and from the last one on, these included.

    No link time is beside them where the rings are full when a pass begins.

    Args:
        placement: Where the layers are.
        layers: Bytes of each layer.
        head: Bytes of the output head.
        head_layers: What the head counts for where it streams.
        cpu: What a layer counts for that the CPU computes.
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
