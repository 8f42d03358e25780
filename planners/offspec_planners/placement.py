"""Which tier each layer lives in, and how many slots the ones that stream pass through."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from offspec_planners.json_fields import Whole


class Tier(StrEnum):
    """Where a layer's weights are between two passes, the fastest first.

    DEVICE: where they are computed with (on a CPU that is its RAM). HOST: RAM, copied to the device once a
    pass. DISK: read once a pass.
    """

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class TooSmallError(ValueError):
    """A budget cannot hold even the smallest arrangement. `needed` bytes would do; `where` is the memory."""

    def __init__(self, needed: int, given: int, where: Tier = Tier.DEVICE) -> None:
        super().__init__(f"{needed} bytes are needed, {given} were given")
        self.needed, self.given, self.where = needed, given, where


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the layers and the head of a model are.

    Args:
        tiers: The tier of each layer.
        slots: Slots of the ring that streamed units are computed from; 0 when none stream.
        staging: Slots in RAM that units from disk pass through on their way to a device with memory of its
            own.
        head: The tier of the output head; where that is not DEVICE, it comes as the last units of a pass.
        caches: The tier of the target's keys and values: DEVICE, or HOST, from where each layer's are copied
            to a device in every pass.
    """

    tiers: tuple[Tier, ...]
    slots: Whole
    staging: Whole = 0
    head: Annotated[Tier, Meta(description='"device", "host" or "disk"')] = Tier.DEVICE
    caches: Annotated[Tier, Meta(description='"device" or "host"')] = Tier.DEVICE

    @classmethod
    def in_memory(
        cls, count: int, resident: Sequence[int], slots: int, head: Tier = Tier.DEVICE
    ) -> "Placement":
        """One memory: the `resident` of `count` layers stay in it, the others come from disk."""
        kept = set(resident)
        tiers = tuple(Tier.DEVICE if layer in kept else Tier.DISK for layer in range(count))
        return cls(tiers, slots, head=head)

    def layers(self, tier: Tier) -> tuple[int, ...]:
        """Indices of the layers in a tier, ascending."""
        return tuple(layer for layer, place in enumerate(self.tiers) if place is tier)

    @property
    def resident(self) -> tuple[int, ...]:
        return self.layers(Tier.DEVICE)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The bytes of what is to be placed.

    Args:
        layers: Bytes read for each layer.
        extra: Further bytes that converting each layer takes: once where layers stream, and permanently for a
            layer that stays.
        head: Bytes of a head that is to stream; 0 where it stays and is counted elsewhere.
        block: Bytes of the largest unit of such a head; 0 where it stays.
    """

    layers: tuple[int, ...]
    extra: tuple[int, ...]
    head: int = 0
    block: int = 0

    @property
    def slot(self) -> int:
        """Bytes of the largest unit that may stream."""
        return max(*self.layers, self.block)

    def kept(self, layer: int) -> int:
        """Bytes of a layer that stays."""
        return self.layers[layer] + self.extra[layer]


def place_layers(sizes: Sizes, memory: int, *, slots: int = 3) -> Placement:
    """Place layers into one memory, which is filled from disk and computed from.

    What the ring leaves keeps layers resident, spread evenly so that the link has time to fill it between
    them.

    Args:
        sizes: Bytes of layers, slots and head.
        memory: Bytes of that memory.
        slots: Slots of the ring where there is room; at least 2 are placed. Default 3.

    Raises:
        TooSmallError: Not even the smallest ring fits.
    """
    resident, ring = _fill(sizes, memory, slots)
    head = Tier.DISK if sizes.head else Tier.DEVICE
    return Placement.in_memory(len(sizes.layers), resident, ring, head)


def place_on_device(sizes: Sizes, device: int, host: int, *, slots: int = 3, staging: int = 3) -> Placement:
    """Place layers on a device with memory of its own, over RAM, over disk.

    The device keeps a ring and as many layers as fit beside it; RAM keeps as many of the rest as fit; the
    others are read from disk, spread evenly among those that come from RAM, so that the disk has time while
    those are copied.

    Args:
        sizes: Bytes of layers, slots and head.
        device: Bytes of the device's memory.
        host: Bytes of RAM.
        slots: Slots of the device's ring where there is room; at least 2 are placed. Default 3.
        staging: Slots in RAM that layers from disk pass through; at least 2 are placed. Default 3.

    Raises:
        TooSmallError: Not even the smallest arrangement fits; names the memory.
    """
    count = len(sizes.layers)
    resident, ring = _fill(sizes, device, slots)
    tiers = [Tier.DEVICE if layer in set(resident) else Tier.HOST for layer in range(count)]
    head = Tier.HOST if sizes.head else Tier.DEVICE
    rest = [layer for layer in range(count) if tiers[layer] is Tier.HOST]
    if sum(sizes.layers[layer] for layer in rest) + sizes.head <= host:
        return Placement(tuple(tiers), ring, 0, head)
    if host < 2 * sizes.slot:
        raise TooSmallError(2 * sizes.slot, host, Tier.HOST)
    stages = staging if host >= staging * sizes.slot else 2
    room = host - stages * sizes.slot
    if sizes.head > room:
        head = Tier.DISK
    elif sizes.head:
        room -= sizes.head
    held = min(room // max(sizes.layers), len(rest))
    kept = {rest[place] for place in spread(len(rest), held)}
    for layer in rest:
        tiers[layer] = Tier.HOST if layer in kept else Tier.DISK
    return Placement(tuple(tiers), ring, stages, head)


def taken(sizes: Sizes, placement: Placement) -> tuple[int, int]:
    """(bytes of the memory that is computed from, bytes of the RAM behind it) that a placement takes."""
    layers_stream = len(placement.resident) < len(placement.tiers)
    slot = sizes.slot if layers_stream else sizes.block
    device = sum(sizes.kept(layer) for layer in placement.resident) + placement.slots * slot
    if layers_stream:
        device += max(sizes.extra)
    host = sum(sizes.layers[layer] for layer in placement.layers(Tier.HOST))
    host += placement.staging * slot + (sizes.head if placement.head is Tier.HOST else 0)
    return device, host


def spread(count: int, chosen: int) -> list[int]:
    """`chosen` of `count` places, as evenly apart as can be."""
    return [int((place + 0.5) * count / chosen) for place in range(chosen)]


def _fill(sizes: Sizes, memory: int, slots: int) -> tuple[list[int], int]:
    """The layers that stay in `memory` bytes, and the slots of the ring beside them."""
    count = len(sizes.layers)
    # A head that streams needs slots even where every layer stays.
    whole = sum(sizes.kept(layer) for layer in range(count)) + 2 * sizes.block
    if whole <= memory:
        return list(range(count)), 2 if sizes.head else 0
    scratch = max(sizes.extra)
    smallest = 2 * sizes.slot + scratch
    if smallest > memory:
        raise TooSmallError(min(smallest, whole), memory)
    ring = next(n for n in range(max(slots, 2), 1, -1) if n * sizes.slot + scratch <= memory)
    room = memory - ring * sizes.slot - scratch
    fitting = min(room // max(sizes.kept(layer) for layer in range(count)), max(count - ring, 0))
    units = count - fitting + (1 if sizes.head else 0)
    return spread(count, fitting), min(ring, units)
