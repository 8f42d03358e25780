"""Memory tier of each layer, and number of streaming buffer slots for the layers that stream."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Annotated

from msgspec import Meta

from offspec_planners.json_fields import Whole

_STAGES = 3  # staging slots in RAM for layers from disk if there is room, else 2


class Tier(StrEnum):
    """Storage of a layer's weights between two passes, fastest first.

    DEVICE: the memory of the processor that computes them (RAM on a CPU). CPU: RAM next to a device with its
    own memory, computed there by the CPU. HOST: RAM, copied to the device once per pass. DISK: read once per
    pass.
    """

    DEVICE = "device"
    CPU = "cpu"
    HOST = "host"
    DISK = "disk"

    @property
    def streams(self) -> bool:
        """Whether weights are transferred to the device in every pass."""
        return self in (Tier.HOST, Tier.DISK)


class TooSmallError(ValueError):
    """A memory limit cannot hold even the smallest arrangement.

    Attributes: `needed`, sufficient bytes; `given`; `where`, the memory; `parts`, bytes by name, if known.
    """

    def __init__(
        self, needed: int, given: int, where: Tier = Tier.DEVICE, parts: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(f"{needed} bytes are needed, but only {given} were given")
        self.needed, self.given, self.where, self.parts = needed, given, where, parts or {}


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of a model's layers and head.

    Args:
        tiers: Tier of each layer.
        slots: Slots of the ring from which streamed units are computed; 0 if nothing streams.
        staging: Slots in RAM that units from disk pass through on their way to a device with its own memory.
        head: Tier of the output head; unless DEVICE, it is streamed as the last units of a pass.
        gpus: Number of the GPU that computes each layer, if there are several, each with its own slots and
            staging; empty with one. The head is on the first GPU.
        caches: Tier of the target's KV cache: DEVICE, or HOST, from which each layer's part is copied to a
            device in every pass.
        expert_slots: Slots of routed experts loaded on demand; 0 if experts are part of their layers.
        host_expert_slots: Slots of such experts in RAM, next to a device with its own memory. If the device
            has no expert slots, the CPU computes the experts.
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
        """Build a placement in one memory: `resident` of `count` layers stay, others come from disk."""
        kept = set(resident)
        tiers = tuple(Tier.DEVICE if layer in kept else Tier.DISK for layer in range(count))
        return cls(tiers, slots, head=head)

    def layers(self, tier: Tier) -> tuple[int, ...]:
        """Return the indices of the layers in a tier, ascending."""
        return tuple(layer for layer, place in enumerate(self.tiers) if place is tier)

    def gpu_of(self, layer: int) -> int:
        """Return the number of the GPU that computes a layer, unless the CPU does."""
        return self.gpus[layer] if self.gpus else 0

    def tiers_on(self, gpu: int) -> tuple[Tier, ...]:
        """Return the tiers of the layers that one GPU computes."""
        return tuple(tier for layer, tier in enumerate(self.tiers) if self.gpu_of(layer) == gpu)

    @property
    def gpu_count(self) -> int:
        """Number of GPUs, 1 when computing in RAM."""
        return max(self.gpus, default=0) + 1

    @property
    def gpu_transfers(self) -> int:
        """Number of times that the rows of a pass are copied from one GPU to another."""
        gpus = [self.gpu_of(layer) for layer, tier in enumerate(self.tiers) if tier is not Tier.CPU]
        return sum(left != right for left, right in pairwise((*gpus, 0)))

    @property
    def resident(self) -> tuple[int, ...]:
        return self.layers(Tier.DEVICE)

    @property
    def on_demand_experts(self) -> bool:
        """Whether routed experts are separate from their layers and loaded on demand."""
        return self.expert_slots > 0 or self.cpu_experts

    @property
    def cpu_experts(self) -> bool:
        """Whether the CPU computes all routed experts next to a device, from slots in RAM."""
        return self.host_expert_slots > 0 and not self.expert_slots


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of everything to be placed.

    Args:
        layers: Bytes read for each layer.
        extra: Further bytes needed to convert each layer: once for all streamed layers, permanently for each
            resident layer.
        head: Bytes of a head that streams; 0 if it is resident and counted elsewhere.
        block: Bytes of the largest unit of a streamed head; 0 if it is resident.
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
        """Return the bytes of a resident layer."""
        return self.layers[layer] + self.extra[layer]


def place_layers(sizes: Sizes, memory: int, *, slots: int = 3) -> Placement:
    """Place layers into one memory, which is filled from disk and computed from.

    Memory not used by the ring keeps layers resident, spread evenly so that the link has time to fill the
    ring between them.

    Args:
        sizes: Bytes of layers, slots and head.
        memory: Bytes of that memory.
        slots: Slots of the ring if there is room; at least 2 are placed. Default 3.

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
    """Place layers on devices with their own memory, then RAM, then disk.

    A device keeps a ring and as many layers as fit in addition. RAM keeps the layers computed by the CPU, and
    as many others as fit. The rest is read from disk, spread evenly among the layers from RAM, so that the
    disk has time while those are copied.

    With several GPUs, each has rings and a link of its own. If all layers stay, each GPU gets a contiguous
    run of them, and rows are copied once between GPUs. Otherwise streamed layers are assigned to the GPUs in
    turn, so that all links are busy at the same time, and resident layers to any GPU with room, preferably
    the GPU of the previous layer.

    Args:
        sizes: Bytes of layers, slots and head; the head is on the first device.
        rooms: Bytes of each device's memory.
        host: Bytes of RAM.
        cache: Bytes of a layer's KV cache, on the GPU that computes the layer, if there are several. Default
            0.
        slots: Slots of each device's ring if there is room; at least 2 are placed. Default 3.
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
        return _place_in_host(sizes, Placement(tuple(tiers), ring), host)
    runs = _runs(sizes, rooms, layers, cache)
    if runs is not None:
        for layer, gpu in zip(layers, runs, strict=True):
            tiers[layer], gpus[layer] = Tier.DEVICE, gpu
        return _place_in_host(sizes, Placement(tuple(tiers), 2 if sizes.head else 0, gpus=tuple(gpus)), host)
    ring, fitting = _rings(sizes, rooms, len(layers), cache, slots)
    staying = set(spread_evenly(len(layers), sum(fitting)))
    streamed, last = 0, 0
    for place, layer in enumerate(layers):
        tiers[layer] = Tier.DEVICE if place in staying else Tier.HOST
        if tiers[layer] is Tier.HOST:
            last, streamed = streamed % len(rooms), streamed + 1
        else:
            last = last if fitting[last] else fitting.index(max(fitting))
            fitting[last] -= 1
        gpus[layer] = last
    return _place_in_host(sizes, Placement(tuple(tiers), ring, gpus=tuple(gpus)), host)


def _runs(sizes: Sizes, rooms: Sequence[int], layers: Sequence[int], cache: int) -> list[int] | None:
    """Return the GPU of each layer if all of them stay; None if they do not fit."""
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
    """Return the slots of each GPU's ring, and how many of `count` layers stay on each GPU."""
    aside = max(sizes.extra) + cache * -(-count // len(rooms))  # maximum for the layers that stream there
    for room in rooms:
        if room < 2 * sizes.slot + aside:
            raise TooSmallError(2 * sizes.slot + aside, room)
    ring = next(n for n in range(max(slots, 2), 1, -1) if n * sizes.slot + aside <= min(rooms))
    largest = max(map(sizes.kept, range(len(sizes.layers)))) + cache
    fitting = [(room - ring * sizes.slot - aside) // largest for room in rooms]
    while sum(fitting) > max(count - len(rooms), 0):
        fitting[fitting.index(max(fitting))] -= 1
    return ring, fitting


def _place_in_host(sizes: Sizes, placed: Placement, host: int) -> Placement:
    """Place streamed layers in RAM, next to the layers that the CPU computes, or on disk.

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
    kept = {rest[place] for place in spread_evenly(len(rest), held)}
    for layer in rest:
        tiers[layer] = Tier.HOST if layer in kept else Tier.DISK
    return replace(placed, tiers=tuple(tiers), staging=stages, head=head)


def taken(sizes: Sizes, placement: Placement, cache: int = 0) -> tuple[list[int], int]:
    """Return the bytes used by a placement in each memory that is computed from, and in RAM next to a device.

    cache: bytes of each layer's KV cache if they are to be counted. Default 0.
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


def spread_evenly(count: int, chosen: int) -> list[int]:
    """Return `chosen` of `count` places, spread as evenly as possible."""
    return [int((place + 0.5) * count / chosen) for place in range(chosen)]


def cpu_layers(count: int, wanted: int) -> tuple[int, ...]:
    """Return the layers computed by the CPU if it computes `wanted` of `count` layers.

    They depend on nothing else, since CPU and GPU floating-point results differ. Spread evenly, they leave
    the link time to refill the ring while each of them is computed.
    """
    return tuple(spread_evenly(count, min(wanted, count)))


def _fill(sizes: Sizes, memory: int, slots: int, layers: Sequence[int]) -> tuple[list[int], int]:
    """Return those of `layers` that stay in `memory` bytes, and the slots of the ring."""
    # A streamed head needs slots even if every layer stays.
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
    return [layers[place] for place in spread_evenly(count, fitting)], min(ring, units)
