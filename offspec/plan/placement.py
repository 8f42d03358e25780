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
    with memory of its own sets aside; beside it, `host` stays in RAM, and `hosted` is what
    keys and values take that live there.
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

    @property
    def passing(self) -> int:
        """What goes to a device passes through RAM: a layer, or the head, at a time."""
        return max(self.rest, *self.layers)

    @property
    def weights_aside(self) -> int:
        """Everything but layers and the process itself."""
        return self.rest + self.caches + self.scratch + self.draft

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
    device, host = taken(sizes, placement)
    usable = int(memory * (1 - _KERNEL_SHARE)) - needs.runtime - MARGIN
    if device_memory is None:
        return device <= usable - wanted.weights_aside
    aside = wanted.device_runtime + wanted.weights_aside
    return device <= device_memory - aside and host <= usable - wanted.passing - wanted.host - wanted.hosted


def _place(memory: int, needs: Needs, sizes: Sizes, device_memory: int | None) -> Placement:
    usable = int(memory * (1 - _KERNEL_SHARE)) - needs.runtime - MARGIN
    if device_memory is None:
        return place_layers(sizes, usable - needs.weights_aside)
    aside = needs.device_runtime + needs.weights_aside
    return place_on_device(sizes, device_memory - aside, usable - needs.passing - needs.host - needs.hosted)


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
    if on_device or not apart:
        parts |= {
            "the device's own share": needs.device_runtime,
            "head and norms": needs.rest,
            "KV caches": needs.caches,
            "activations": needs.scratch,
            "the draft": needs.draft,
        }
    parts["two layers"] = error.needed
    least = sum(parts.values())
    if not on_device:
        parts["the kernel"] = int(least / (1 - _KERNEL_SHARE)) + 2 - least
        least += parts["the kernel"]
    listing = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    kind, option = ("device memory", "--vram") if on_device else ("memory", "--memory")
    return CapacityError(
        f"{format_bytes(given)} of {kind} is too little: the least that would do is "
        f"{format_bytes(-(-least // 10**7) * 10**7)} ({listing}); "
        f"give more {option} or ask for less --context",
        needed=least,
        given=given,
    )
