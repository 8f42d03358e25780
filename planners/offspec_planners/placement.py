"""Which tier each layer lives in, and how many slots the ones that stream pass through."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Annotated

from msgspec import Meta

from offspec_planners.json_fields import Whole

_STAGES = 3  # slots in RAM that layers from disk pass through where there is room, else 2


class Tier(StrEnum):
    """Where a layer's weights are between two passes, the fastest first.

    DEVICE: where they are computed with (on a CPU that is its RAM). CPU: RAM beside a device with memory of
    its own, computed there by the CPU. HOST: RAM, copied to the device once a pass. DISK: read once a pass.
    """

    DEVICE = "device"
    CPU = "cpu"
    HOST = "host"
    DISK = "disk"

    @property
    def streams(self) -> bool:
        """Whether weights come to the device in every pass."""
        return self in (Tier.HOST, Tier.DISK)


class TooSmallError(ValueError):
    """A memory limit cannot hold even the smallest arrangement.

    Attributes: `needed`, bytes that would do; `given`; `where`, the memory; `parts`, bytes by name, if known.
    """

    def __init__(
        self, needed: int, given: int, where: Tier = Tier.DEVICE, parts: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(f"{needed} bytes are needed, {given} were given")
        self.needed, self.given, self.where, self.parts = needed, given, where, parts or {}


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the layers and the head of a model are.

    Args:
        tiers: The tier of each layer.
        slots: Slots of the ring that streamed units are computed from; 0 when none stream.
        staging: Slots in RAM that units from disk pass through on their way to a device with memory of its
            own.
        head: The tier of the output head; where that is not DEVICE, it comes as the last units of a pass.
        gpus: Which of several GPUs computes each layer, by its number, each with slots and staging of its
            own; empty where there is one. The head is the first one's.
        caches: The tier of the target's keys and values: DEVICE, or HOST, from where each layer's are copied
            to a device in every pass.
        expert_slots: Slots of routed experts that are read when they are asked for; 0 where experts are
            parts of their layers.
        host_expert_slots: The same in RAM, behind a device with memory of its own. Where the device has none,
            the CPU computes the experts.
    """

    tiers: tuple[Tier, ...]
    slots: Whole
    staging: Whole = 0
    head: Annotated[Tier, Meta(description='"device", "host" or "disk"')] = Tier.DEVICE
    gpus: tuple[Whole, ...] = ()
    caches: Annotated[Tier, Meta(description='"device" or "host"')] = Tier.DEVICE
    expert_slots: Whole = 0
    host_expert_slots: Whole = 0

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

    def gpu_of(self, layer: int) -> int:
        """The number of the GPU that computes a layer, where it is not the CPU that does."""
        return self.gpus[layer] if self.gpus else 0

    def tiers_on(self, gpu: int) -> tuple[Tier, ...]:
        """Of the layers that one GPU computes."""
        return tuple(tier for layer, tier in enumerate(self.tiers) if self.gpu_of(layer) == gpu)

    @property
    def gpu_count(self) -> int:
        """How many GPUs there are, 1 where the computing is done in RAM."""
        return max(self.gpus, default=0) + 1

    @property
    def hops(self) -> int:
        """How often the rows of a pass go from one GPU to another."""
        gpus = [self.gpu_of(layer) for layer, tier in enumerate(self.tiers) if tier is not Tier.CPU]
        return sum(left != right for left, right in pairwise((*gpus, 0)))

    @property
    def resident(self) -> tuple[int, ...]:
        return self.layers(Tier.DEVICE)

    @property
    def by_need(self) -> bool:
        """Whether routed experts are apart from their layers, and read when they are asked for."""
        return self.expert_slots > 0 or self.cpu_experts

    @property
    def cpu_experts(self) -> bool:
        """Whether the CPU computes all routed experts beside a device, from slots in RAM."""
        return self.host_expert_slots > 0 and not self.expert_slots


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
    resident, ring = _fill(sizes, memory, slots, range(len(sizes.layers)))
    head = Tier.DISK if sizes.head else Tier.DEVICE
    return Placement.in_memory(len(sizes.layers), resident, ring, head)


def place_on_devices(
    sizes: Sizes,
    rooms: Sequence[int],
    host: int,
    *,
    cache: int = 0,
    slots: int = 3,
    cpu: Sequence[int] = (),
) -> Placement:
    """Place layers on devices with memories of their own, over RAM, over disk.

    A device keeps a ring and as many layers as fit beside it; RAM keeps those that the CPU computes, and as
    many of the rest as fit; the others are read from disk, spread evenly among those that come from RAM, so
    that the disk has time while those are copied.

    Of several GPUs each has rings and a link of its own. Where all layers stay, each has a run of them, and
    rows hop once. Else those that stream go to the GPUs in turn, so that all links are busy at the same time,
    and those that stay to whichever has room, the one of the layer before if it can be.

    Args:
        sizes: Bytes of layers, slots and head; the head is the first device's.
        rooms: Bytes of each device's memory.
        host: Bytes of RAM.
        cache: Bytes of keys and values of a layer, on that of several GPUs that computes it. Default 0.
        slots: Slots of each device's ring where there is room; at least 2 are placed. Default 3.
        cpu: Layers that the CPU computes. Default none.

    Raises:
        TooSmallError: Not even the smallest arrangement fits; names the memory.
    """
    layers = [layer for layer in range(len(sizes.layers)) if layer not in set(cpu)]
    tiers, gpus = [Tier.CPU] * len(sizes.layers), [0] * len(sizes.layers)
    if len(rooms) == 1:
        resident, ring = _fill(sizes, rooms[0], slots, layers)
        for layer in layers:
            tiers[layer] = Tier.DEVICE if layer in set(resident) else Tier.HOST
        return _beside_cpu(sizes, Placement(tuple(tiers), ring), host)
    runs = _runs(sizes, rooms, layers, cache)
    if runs is not None:
        for layer, gpu in zip(layers, runs, strict=True):
            tiers[layer], gpus[layer] = Tier.DEVICE, gpu
        return _beside_cpu(sizes, Placement(tuple(tiers), 2 if sizes.head else 0, gpus=tuple(gpus)), host)
    ring, fitting = _rings(sizes, rooms, len(layers), cache, slots)
    staying = set(spread(len(layers), sum(fitting)))
    streamed, last = 0, 0
    for place, layer in enumerate(layers):
        tiers[layer] = Tier.DEVICE if place in staying else Tier.HOST
        if tiers[layer] is Tier.HOST:
            last, streamed = streamed % len(rooms), streamed + 1
        else:
            last = last if fitting[last] else fitting.index(max(fitting))
            fitting[last] -= 1
        gpus[layer] = last
    return _beside_cpu(sizes, Placement(tuple(tiers), ring, gpus=tuple(gpus)), host)


def _runs(sizes: Sizes, rooms: Sequence[int], layers: Sequence[int], cache: int) -> list[int] | None:
    """The GPU of each layer where all of them stay; None where they do not fit."""
    found, gpu, left = list[int](), 0, rooms[0] - 2 * sizes.block
    if left < 0:
        return None
    for layer in layers:
        needed = sizes.kept(layer) + cache
        while needed > left:
            gpu += 1
            if gpu == len(rooms):
                return None
            left = rooms[gpu]
        left -= needed
        found.append(gpu)
    return found


def _rings(sizes: Sizes, rooms: Sequence[int], count: int, cache: int, slots: int) -> tuple[int, list[int]]:
    """Slots of each GPU's ring, and how many of `count` layers stay on each of them."""
    aside = max(sizes.extra) + cache * -(-count // len(rooms))  # for those that stream there, at most
    for room in rooms:
        if room < 2 * sizes.slot + aside:
            raise TooSmallError(2 * sizes.slot + aside, room)
    ring = next(n for n in range(max(slots, 2), 1, -1) if n * sizes.slot + aside <= min(rooms))
    largest = max(map(sizes.kept, range(len(sizes.layers)))) + cache
    fitting = [(room - ring * sizes.slot - aside) // largest for room in rooms]
    while sum(fitting) > max(count - len(rooms), 0):
        fitting[fitting.index(max(fitting))] -= 1
    return ring, fitting


def _beside_cpu(sizes: Sizes, placed: Placement, host: int) -> Placement:
    """The same with what streams in RAM, beside the layers that the CPU computes, or on disk.

    Raises TooSmallError.
    """
    own = sum(sizes.kept(layer) for layer in placed.layers(Tier.CPU))
    tiers, head, left = list(placed.tiers), Tier.HOST if sizes.head else Tier.DEVICE, host - own
    rest = [layer for layer in range(len(tiers)) if tiers[layer].streams]
    waiting = sum(sizes.layers[layer] for layer in rest) + sizes.head
    if waiting <= left:
        return replace(placed, head=head)
    stage = sizes.slot * placed.gpu_count
    if left < 2 * stage:
        raise TooSmallError(min(2 * stage, waiting) + own, host, Tier.HOST)
    stages = _STAGES if left >= _STAGES * stage else 2
    left -= stages * stage
    if sizes.head > left:
        head = Tier.DISK
    elif sizes.head:
        left -= sizes.head
    held = min(left // max(sizes.layers), len(rest))
    kept = {rest[place] for place in spread(len(rest), held)}
    for layer in rest:
        tiers[layer] = Tier.HOST if layer in kept else Tier.DISK
    return replace(placed, tiers=tuple(tiers), staging=stages, head=head)


def taken(sizes: Sizes, placement: Placement, cache: int = 0) -> tuple[list[int], int]:
    """(bytes of each memory that is computed from, bytes of the RAM behind) that a placement takes.

    cache: bytes of keys and values of each layer where they are to be counted. Default 0.
    """
    layers_stream = any(tier.streams for tier in placement.tiers)
    slot = sizes.slot if layers_stream else sizes.block
    devices = [placement.slots * slot + (max(sizes.extra) if layers_stream else 0)] * placement.gpu_count
    if not layers_stream:
        devices[1:] = [0] * (placement.gpu_count - 1)  # the head's ring is the first one's
    for layer, tier in enumerate(placement.tiers):
        if tier is not Tier.CPU:
            kept = sizes.kept(layer) if tier is Tier.DEVICE else 0
            devices[placement.gpu_of(layer)] += kept + cache
    host = sum(sizes.layers[layer] for layer in placement.layers(Tier.HOST))
    host += sum(sizes.kept(layer) for layer in placement.layers(Tier.CPU))
    host += placement.staging * slot * placement.gpu_count + (
        sizes.head if placement.head is Tier.HOST else 0
    )
    return devices, host


def spread(count: int, chosen: int) -> list[int]:
    """`chosen` of `count` places, as evenly apart as can be."""
    return [int((place + 0.5) * count / chosen) for place in range(chosen)]


def cpu_layers(count: int, wanted: int) -> tuple[int, ...]:
    """Which of `count` layers the CPU computes where it is to compute `wanted` of them.

    They depend on nothing else, since a CPU rounds in another way than a GPU does. Spread evenly, they leave
    the link time to fill the ring again while each of them is computed.
    """
    return tuple(spread(count, min(wanted, count)))


def _fill(sizes: Sizes, memory: int, slots: int, layers: Sequence[int]) -> tuple[list[int], int]:
    """Those of `layers` that stay in `memory` bytes, and the slots of the ring beside them."""
    # A head that streams needs slots even where every layer stays.
    whole = sum(sizes.kept(layer) for layer in layers) + 2 * sizes.block
    if whole <= memory:
        return list(layers), 2 if sizes.head else 0
    scratch = max(sizes.extra)
    smallest = 2 * sizes.slot + scratch
    if smallest > memory:
        raise TooSmallError(min(smallest, whole), memory)
    ring = next(n for n in range(max(slots, 2), 1, -1) if n * sizes.slot + scratch <= memory)
    room = memory - ring * sizes.slot - scratch
    count = len(layers)
    fitting = min(room // max(map(sizes.kept, layers)), max(count - ring, 0)) if layers else 0
    units = count - fitting + (1 if sizes.head else 0)
    return [layers[place] for place in spread(count, fitting)], min(ring, units)
