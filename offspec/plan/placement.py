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


LEAST_EXPERTS = 8  # slots of experts that there must be room for where they are read when asked for


@dataclass(frozen=True, slots=True)
class ExpertNeeds:
    """What a model takes whose routed experts are read when they are asked for, in bytes.

    layers and extra are those of `Needs` without experts; slot: of one expert; count: how many there are;
    copied: what is allocated while one runs; spared: what of `scratch` was for unpacking all of a layer's
    together; beside: what RAM needs besides where the CPU computes them beside a device, `copied` included.
    """

    layers: list[int]
    extra: list[int]
    slot: int
    count: int
    copied: int = 0
    spared: int = 0
    beside: int = 0

    @property
    def least(self) -> int:
        """Slots that there must be."""
        return min(LEAST_EXPERTS, self.count)


@dataclass(frozen=True, slots=True)
class Needs:
    """What must fit, in bytes. runtime is the process itself before any weights are read.

    rest counts a head that stays; `head` of it may stream instead, in units of `block` bytes (0 where it
    may not), and its logits for all nodes of a tree then take `logits`. device_runtime is what a device
    with memory of its own sets aside; beside it, `host` stays in RAM, and `hosted` is what keys and values
    take that live there. cpu: layers that the CPU computes beside it, for which `beside` is needed in RAM
    besides their weights, and whose caches `caches` does not count. more: what further GPUs have for layers
    and their caches, of `cache` bytes each, which of `caches` are `cached` in all. experts: given where
    layers have experts that may be read when they are asked for; slots: what slots of them take;
    behind: what slots of them take in RAM beside a device.
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
    experts: ExpertNeeds | None = None
    slots: int = 0
    behind: int = 0

    @property
    def passing(self) -> int:
        """What goes to a device passes through RAM: a layer, or the head, at a time."""
        return max(self.rest, *self.layers)

    @property
    def host_aside(self) -> int:
        """Bytes of RAM beside a device that has memory of its own, for everything but layers."""
        return self.passing + self.beside + self.host + self.hosted + self.behind

    @property
    def weights_aside(self) -> int:
        """Everything but layers and the process itself."""
        return self.rest + self.caches + self.scratch + self.draft + self.slots

    def rooms(self, device_memory: int) -> list[int]:
        """Bytes that each GPU has for layers, the first of `device_memory`; of several for caches, too."""
        first = device_memory - self.device_runtime - self.weights_aside
        return [first + self.cached, *self.more] if self.more else [first]

    def with_expert_slots(self, slots: int, behind: int = 0) -> "Needs":
        """The same with so many slots, and layers without the experts; without any, as it is.

        behind: slots in RAM beside a device with memory of its own; if there are no others, the CPU computes
        the experts. Default 0.
        """
        if not (slots or behind) or self.experts is None:
            return self
        apart = self.experts
        return replace(
            self,
            layers=apart.layers,
            extra=apart.extra,
            scratch=self.scratch - apart.spared + (apart.copied if slots else 0),
            beside=self.beside + (0 if slots else apart.beside),
            experts=None,
            slots=slots * apart.slot,
            behind=behind * apart.slot,
        )

    def scaled(self, share: float) -> "Needs":
        """The same with the size of each layer, and expert, as a part of what it is."""
        apart = self.experts
        if apart is not None:
            layers = [int(size * share) for size in apart.layers]
            apart = replace(apart, layers=layers, slot=max(int(apart.slot * share), 1))
        return replace(self, layers=[int(size * share) for size in self.layers], experts=apart)

    def with_streamed_head(self) -> "Needs":
        """The same with the head as the last units of a pass."""
        return replace(self, rest=self.rest - self.head, scratch=self.scratch + self.logits, head=0)


def divide(
    memory: int, needs: Needs, device_memory: int | None = None, *, cpu_experts: bool = False
) -> Placement:
    """Place layers, and a head that may stream.

    Where not all of a model fits where it is computed, its experts are read when they are asked for if they
    can be: all else gets its place first, and what is left keeps experts.

    Args:
        memory: Bytes of RAM.
        needs: Bytes of everything that must fit.
        device_memory: Bytes of a device; None where the computing is done in RAM.
        cpu_experts: Whether the CPU computes experts that can be read by need beside the device, however much
            of the model would fit there. Default False.

    Raises:
        CapacityError: It does not fit; lists the parts.
    """
    if needs.experts is None:
        return _divide(memory, needs, device_memory)
    if cpu_experts and device_memory is not None:
        return _divide_beside_cpu(memory, needs, needs.experts, device_memory)
    found, failures = list[Placement](), list[CapacityError]()
    for divided in (_divide, _divide_by_need):
        try:
            found.append(divided(memory, needs, device_memory))
        except CapacityError as error:
            failures.append(error)
            continue
        if not found[-1].slots:  # all of it stays
            break
    if not found:
        raise min(failures, key=lambda error: error.needed)
    return found[-1]


def _divide_by_need(memory: int, needs: Needs, device_memory: int | None) -> Placement:
    """The same with experts in slots, in RAM or on a device and in RAM behind it."""
    assert needs.experts is not None
    slot, least, most = needs.experts.slot, needs.experts.least, needs.experts.count
    if device_memory is None:
        wanted = needs.with_expert_slots(least)
        placement = _divide(memory, wanted, None)
        return replace(placement, expert_slots=min(least + _left(memory, wanted, placement) // slot, most))
    apart = needs.with_expert_slots(least, least)
    placement = _divide(memory, apart, device_memory)
    wanted, sizes = _with_head(apart, placement)
    devices, host = taken(sizes, placement)
    near = min(least + (wanted.rooms(device_memory)[0] - devices[0]) // slot, most)
    behind = least + (_usable(memory, apart) - wanted.host_aside - host) // slot
    # Where the device keeps all of them, they only pass through RAM.
    return replace(
        placement, expert_slots=near, host_expert_slots=least if near == most else min(behind, most)
    )


def _divide_beside_cpu(memory: int, needs: Needs, experts: ExpertNeeds, device_memory: int) -> Placement:
    """The same with slots in RAM alone, from which the CPU computes all experts."""
    wanted = needs.with_expert_slots(0, experts.least)
    placement = _divide(memory, wanted, device_memory)
    beside, sizes = _with_head(wanted, placement)
    more = (_usable(memory, wanted) - beside.host_aside - taken(sizes, placement)[1]) // experts.slot
    return replace(placement, host_expert_slots=min(experts.least + more, experts.count))


def _divide(memory: int, needs: Needs, device_memory: int | None) -> Placement:
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
    if placement.by_need and (
        needs.experts is None or (device_memory is not None) != (placement.host_expert_slots > 0)
    ):
        return False
    needs = needs.with_expert_slots(placement.expert_slots, placement.host_expert_slots)
    if device_memory is None:
        return _left(memory, needs, placement) >= 0
    wanted, sizes = _with_head(needs, placement)
    devices, host = taken(sizes, placement, wanted.cache if wanted.more else 0)
    usable = _usable(memory, needs)
    rooms = wanted.rooms(device_memory)
    if len(devices) > len(rooms) or host > usable - wanted.host_aside:
        return False
    return all(device <= room for device, room in zip(devices, rooms, strict=False))


def _left(memory: int, needs: Needs, placement: Placement) -> int:
    """Bytes of RAM that a placement leaves where all computing is done there; below 0: it does not fit."""
    wanted, sizes = _with_head(needs, placement)
    return _usable(memory, needs) - wanted.weights_aside - taken(sizes, placement)[0][0]


def _usable(memory: int, needs: Needs) -> int:
    """Bytes of RAM beside the process itself."""
    return int(memory * (1 - _KERNEL_SHARE)) - needs.runtime - MARGIN


def _place(memory: int, needs: Needs, sizes: Sizes, device_memory: int | None) -> Placement:
    usable = _usable(memory, needs)
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


def _with_head(needs: Needs, placement: Placement) -> tuple[Needs, Sizes]:
    """Those with the head where the placement has it."""
    return list(_heads(needs))[-1 if placement.head is not Tier.DEVICE else 0]


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
        parts["experts on their way" if needs.slots else "experts in RAM"] = needs.behind
        parts["keys and values in RAM"] = needs.hosted
        parts["computing on the CPU"] = needs.beside
    if on_device or not apart:
        parts |= {
            "the device's own share": needs.device_runtime,
            "head and norms": needs.rest,
            "KV caches": needs.caches,
            "activations": needs.scratch,
            "the draft": needs.draft,
            "experts": needs.slots,
        }
    own = sum(needs.layers[layer] + needs.extra[layer] for layer in needs.cpu) if not on_device else 0
    parts["layers of the CPU"] = own
    parts["two layers"] = error.needed - own
    least = sum(parts.values())
    if not on_device:
        parts["the kernel"] = int(least / (1 - _KERNEL_SHARE)) + 2 - least
        least += parts["the kernel"]
    listing = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    kind, option = ("device memory", "`vram`") if on_device else ("memory", "`memory`")
    fewer = " or `cpu_layers`" if own else ""
    return CapacityError(
        f"{format_bytes(given)} of {kind} is too little: the least that would do is "
        f"{format_bytes(-(-least // 10**7) * 10**7)} ({listing}); "
        f"give more {option} or ask for less `context`{fewer}",
        needed=least,
        given=given,
    )
