"""How memory within its limits is divided: what must fit, and which layers stay where."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from offspec.core.config import format_bytes
from offspec.core.errors import CapacityError
from offspec.core.memory import MARGIN
from offspec_planners.placement import (
    Placement,
    Sizes,
    Tier,
    TooSmallError,
    place_layers,
    place_on_device,
    place_on_devices,
    taken,
)

# Page tables, buffers of the kernel and the pages of libraries count against a control group as well. A
# process that fills its limit to the last page spends its time reading its own code back in.
_KERNEL_SHARE = 0.06


@dataclass(frozen=True, slots=True)
class Needs:
    """What must fit, in bytes. runtime is the process itself before any weights are read.

    rest counts a head that stays; `head` of it may stream instead, in units of `block` bytes (0 where it
    may not), and its logits for all nodes of a tree then take `logits`. device_runtime is what a device
    with memory of its own sets aside; beside it, `host` stays in RAM, and `hosted` is what keys and values
    take that live there. cpu: layers that the CPU computes beside it, for which `beside` is needed in RAM
    besides their weights, and whose caches `caches` does not count. more: what further GPUs have for layers
    and their caches, of `cache` bytes each, which of `caches` are `cached` in all.
    """

    runtime: int
    rest: int
    caches: int
    scratch: int
    draft: int
    layers: list[int]
    extra: list[int]
    head: int = 0
    block: int = 0
    logits: int = 0
    device_runtime: int = 0
    host: int = 0
    hosted: int = 0
    cpu: tuple[int, ...] = ()
    beside: int = 0
    more: tuple[int, ...] = ()
    cache: int = 0
    cached: int = 0

    @property
    def passing(self) -> int:
        """What goes to a device passes through RAM: a layer, or the head, at a time."""
        return max(self.rest, *self.layers)

    @property
    def host_aside(self) -> int:
        """Bytes of RAM beside a device that has memory of its own, for everything but layers."""
        return self.passing + self.beside + self.host + self.hosted

    @property
    def weights_aside(self) -> int:
        """Everything but layers and the process itself."""
        return self.rest + self.caches + self.scratch + self.draft

    def rooms(self, device_memory: int) -> list[int]:
        """Bytes that each GPU has for layers, the first of `device_memory`; of several for caches, too."""
        first = device_memory - self.device_runtime - self.weights_aside
        return [first + self.cached, *self.more] if self.more else [first]

    def with_streamed_head(self) -> "Needs":
        """The same with the head as the last units of a pass."""
        return replace(self, rest=self.rest - self.head, scratch=self.scratch + self.logits, head=0)


def divide(memory: int, needs: Needs, device_memory: int | None = None) -> Placement:
    """Place layers, and a head that may stream.

    Args:
        memory: Bytes of RAM.
        needs: Bytes of everything that must fit.
        device_memory: Bytes of a device; None where the computing is done in RAM.

    Raises:
        CapacityError: It does not fit; lists the parts.
    """
    placements, failures = list[Placement](), list[tuple[TooSmallError, Needs]]()
    for wanted, sizes in _heads(needs):
        try:
            placements.append(_place(memory, wanted, sizes, device_memory))
        except TooSmallError as error:
            failures.append((error, wanted))
            continue
        if not _cramped(placements[-1]):
            return placements[-1]
    if placements:
        return placements[0]
    failure, failed = min(
        failures, key=lambda found: (found[0].where is Tier.DEVICE, _least(found[1], found[0]))
    )
    given = memory if device_memory is None or failure.where is Tier.HOST else device_memory
    raise _too_small(given, failed, failure, device_memory is not None)


def placement_fits(memory: int, needs: Needs, placement: Placement, device_memory: int | None = None) -> bool:
    """Whether a placement that was decided elsewhere fits as well; see `divide`."""
    wanted, sizes = list(_heads(needs))[-1 if placement.head is not Tier.DEVICE else 0]
    devices, host = taken(sizes, placement, wanted.cache if wanted.more else 0)
    usable = int(memory * (1 - _KERNEL_SHARE)) - needs.runtime - MARGIN
    if device_memory is None:
        return devices[0] <= usable - wanted.weights_aside
    rooms = wanted.rooms(device_memory)
    if len(devices) > len(rooms) or host > usable - wanted.host_aside:
        return False
    return all(device <= room for device, room in zip(devices, rooms, strict=False))


def _place(memory: int, needs: Needs, sizes: Sizes, device_memory: int | None) -> Placement:
    usable = int(memory * (1 - _KERNEL_SHARE)) - needs.runtime - MARGIN
    if device_memory is None:
        return place_layers(sizes, usable - needs.weights_aside)
    rooms, host = needs.rooms(device_memory), usable - needs.host_aside
    if len(rooms) == 1:
        return place_on_device(sizes, rooms[0], host, cpu=needs.cpu)
    return place_on_devices(sizes, rooms, host, cache=needs.cache, cpu=needs.cpu)


def _cramped(placement: Placement) -> bool:
    """Whether there was room for no layer, and for two slots only.

    With two the link stands still whenever one is full and the other in use: a third is worth more than a
    head that stays.
    """
    return placement.slots == 2 and not placement.resident


def _heads(needs: Needs) -> Iterator[tuple[Needs, Sizes]]:
    """The head kept, and the head streaming where it may."""
    sizes = Sizes(tuple(needs.layers), tuple(needs.extra))
    yield needs, sizes
    if needs.head:
        yield needs.with_streamed_head(), replace(sizes, head=needs.head, block=needs.block)


def _least(needs: Needs, error: TooSmallError) -> int:
    return needs.weights_aside + error.needed


def _too_small(given: int, needs: Needs, error: TooSmallError, apart: bool) -> CapacityError:
    """The error for a budget that is too small, with what would do and what it goes to."""
    on_device = apart and error.where is Tier.DEVICE
    parts = {}
    if not on_device:
        parts["Python and libraries"] = needs.runtime + MARGIN
        parts["on its way to the device"] = needs.passing if apart else 0
        parts["the draft's embedding"] = needs.host
        parts["keys and values in RAM"] = needs.hosted
        parts["computing on the CPU"] = needs.beside
    if on_device or not apart:
        parts |= {
            "the device's own share": needs.device_runtime,
            "head and norms": needs.rest,
            "KV caches": needs.caches,
            "activations": needs.scratch,
            "the draft": needs.draft,
        }
    own = sum(needs.layers[layer] + needs.extra[layer] for layer in needs.cpu) if not on_device else 0
    parts["layers of the CPU"] = own
    parts["two layers"] = error.needed - own
    least = sum(parts.values())
    if not on_device:
        parts["the kernel"] = int(least / (1 - _KERNEL_SHARE)) + 2 - least
        least += parts["the kernel"]
    listing = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    kind, option = ("device memory", "--vram") if on_device else ("memory", "--memory")
    fewer = " or --cpu-layers" if own else ""
    return CapacityError(
        f"{format_bytes(given)} of {kind} is too little: the least that would do is "
        f"{format_bytes(-(-least // 10**7) * 10**7)} ({listing}); "
        f"give more {option} or ask for less --context{fewer}",
        needed=least,
        given=given,
    )
