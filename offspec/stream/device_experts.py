"""Units that are asked for, in slots of a device: copied from pinned slots in RAM, which a disk fills.

A unit in a slot of the device is neither read nor copied. Copies have a stream of their own: two are under
way while the device computes with what came before, or one while the disk fills slots in RAM again. As in the
store in RAM, all that must survive an interrupt is `_kept`: a unit is in it while its slot holds all of it,
and every other slot is free or being filled.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from offspec.core.trace import OFF, Timeline
from offspec.stream.arena import round_up
from offspec.stream.expert_store import ExpertStore, StoreStats
from offspec.stream.layout import UnitLayout
from offspec.stream.usage import Usage
from offspec.stream.workers import BytesMoved, RingStats

_UNDER_WAY = 2  # copies: the next is there before the host has woken up from waiting for one
_ALIGNED = 256  # bytes: slots begin at multiples of it, as what an allocator gives does


class _Copy(NamedTuple):
    """A copy under way: of which unit, into which slot, and the event behind it."""

    unit: int
    slot: int
    whole: torch.cuda.Event


class DeviceExpertStore:
    """Slots of a CUDA device over an `ExpertStore` in RAM, whose units are its own.

    Args:
        below: Where units come from, in pinned memory if it could be had. Closed with this one.
        layouts: The units, as they are arranged in slots of `below`.
        slots: How many units are kept on the device.
        device: A CUDA device.
        timeline: Records waits for copies.
    """

    def __init__(
        self,
        below: ExpertStore,
        layouts: Sequence[UnitLayout],
        slots: int,
        device: torch.device,
        timeline: Timeline = OFF,
    ) -> None:
        assert slots >= 1
        self.below, self.layouts, self.slots = below, layouts, min(slots, len(layouts))
        self.stats, self.copy_stats = StoreStats(), RingStats()
        self.usage = Usage(below.usage.groups.tolist())
        self.device, self._timeline = device, timeline
        each = max(layout.nbytes_on(device) for layout in layouts)
        self.slot_bytes = round_up(each, _ALIGNED)
        self._arena = torch.empty(self.slot_bytes * self.slots, dtype=torch.uint8, device=device)
        self._copies = torch.cuda.Stream(device)
        # The slots may lie where kernels still read what lay there before.
        self._copies.wait_stream(torch.cuda.current_stream(device))
        # Behind the latest copies; who waits for them sleeps.
        self._copied = deque(torch.cuda.Event(blocking=True) for _ in range(_UNDER_WAY))
        self._used: list[torch.cuda.Event | None] = [None] * self.slots  # behind the kernels that read each
        self._kept: dict[int, int] = {}  # unit: slot, in the order in which they came

    @property
    def nbytes(self) -> int:
        """Bytes of all slots of the device."""
        return self._arena.nbytes

    @property
    def read_stats(self) -> RingStats:
        """Bytes read from disk, and how long `fetch` waited for reads and copies."""
        read = self.below.read_stats
        return RingStats(read.bytes_moved, read.wait_seconds + self.copy_stats.wait_seconds)

    @property
    def bytes_moved(self) -> BytesMoved:
        """Bytes copied to the device, and bytes read."""
        return BytesMoved(self.copy_stats.bytes_moved, self.below.bytes_moved.read)

    @property
    def unpinned_bytes(self) -> int:
        """Bytes of RAM that are copied from, and could not be pinned."""
        return self.below.unpinned_bytes

    @property
    def load_bytes(self) -> int:
        """Bytes that `load` reads."""
        return self.below.load_bytes

    @property
    def kept(self) -> tuple[int, ...]:
        """Units in slots of the device, in the order in which they came."""
        return tuple(self._kept)

    def load(self, progress: Callable[[int], None]) -> None:
        """See `ExpertStore.load`."""
        self.below.load(progress)

    def recall(self, shares: Sequence[float]) -> None:
        """See `ExpertStore.recall`; they are copied when they are asked for."""
        self.usage.shares[:] = shares
        self.below.recall(shares)

    def fetch(
        self, units: Sequence[int], counts: Sequence[int] = (), rows: int = 1
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Give each of the units with its slot, uint8 [slot bytes], the caller's until the next.

        Those on the device come first, while the first of the others is copied or read. What the current
        stream is sent before the next is asked for may read the slot.

        Args:
            units: All different, of one group.
            counts: How many of the rows ask for each. Default one.
            rows: Of the pass. Default 1.

        Raises:
            StreamError: A read or a copy failed.
            CheckpointError: A checksum is wrong.
            ClosedError: The store was closed.
        """
        ready = [unit for unit in units if unit in self._kept]
        missing = [unit for unit in units if unit not in self._kept]
        self.stats.asked += len(units)
        self.stats.hits += len(ready)
        asking = dict(zip(units, counts or [1] * len(units), strict=True))
        self.usage.note(units, list(asking.values()), rows)
        leaving = self.usage.leaving(self._kept, asking, len(missing) - (self.slots - len(self._kept)))
        coming = self.below.fetch(missing, [asking[unit] for unit in missing], rows)
        held = [self.below.holds(unit) for unit in missing]
        if not any(held):  # what is there is computed while the first is read
            yield from self._handed(ready)
            ready = []
        # A slot in RAM may be filled again when the next is asked for, unless nothing is read.
        most, under_way = _UNDER_WAY if all(held) else 1, deque[_Copy]()
        for unit, memory in coming:
            slot = self._take_slot(ready, leaving, under_way)
            while slot is None:
                if not ready:
                    ready = [self._landed(under_way)]
                yield from self._handed(ready)
                slot, ready = self._take_slot((), leaving, under_way), []
            under_way.append(self._copy(unit, memory, slot))
            yield from self._handed(ready)
            ready = [self._landed(under_way)] if len(under_way) == most else []
        yield from self._handed(ready)
        while under_way:
            yield from self._handed([self._landed(under_way)])

    def _landed(self, under_way: deque[_Copy]) -> int:
        """The unit of the oldest copy under way, when it is there."""
        copy = under_way.popleft()
        self._wait(copy)
        self._kept[copy.unit] = copy.slot
        return copy.unit

    def _handed(self, units: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        for unit in units:
            slot = self._kept[unit]
            try:
                yield unit, self._arena[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]
            finally:
                self._used[slot] = torch.cuda.current_stream(self.device).record_event()

    def _take_slot(
        self, pinned: Collection[int], leaving: Iterator[int], under_way: Collection[_Copy]
    ) -> int | None:
        """A free slot, for which a unit may have to leave; None where all are needed."""
        if len(self._kept) + len(under_way) < self.slots:
            taken = {*self._kept.values(), *(copy.slot for copy in under_way)}
            return next(slot for slot in range(self.slots) if slot not in taken)
        unit = next(leaving, None)
        if unit is None:  # in waves, those that were handed out
            unit = next((unit for unit in self._kept if unit not in pinned), None)
        return None if unit is None else self._kept.pop(unit)

    def _copy(self, unit: int, memory: torch.Tensor, slot: int) -> _Copy:
        start, layout = slot * self.slot_bytes, self.layouts[unit]
        try:
            with torch.cuda.stream(self._copies):
                used = self._used[slot]
                if used is not None:
                    self._copies.wait_event(used)
                for move in layout.moves_to(self.device):
                    into = self._arena[start + move.target :][: move.length]
                    into.copy_(memory[move.source :][: move.length], non_blocking=True)
                    self.copy_stats.bytes_moved += move.length
                self._copied.rotate()
                self._copied[0].record(self._copies)
                return _Copy(unit, slot, self._copied[0])
        except Exception as error:
            raise layout.error(f"copying {layout.name} failed: {error}") from error

    def _wait(self, copy: _Copy) -> None:
        asked, layout = time.perf_counter(), self.layouts[copy.unit]
        try:
            with self._timeline.span("compute", "wait", unit=layout.name):
                copy.whole.synchronize()
        except Exception as error:
            raise layout.error(f"copying {layout.name} failed: {error}") from error
        finally:
            self.copy_stats.wait_seconds += time.perf_counter() - asked

    def abandon(self) -> None:
        """After an error or an interrupt: forget what was on its way; what is in slots stays."""
        self.below.abandon()

    def close(self) -> None:
        """Stop reading and copying. May be called twice."""
        self._kept.clear()
        try:
            self._copies.synchronize()  # else memory is unpinned, and freed, under a copy
        finally:
            self.below.close()
            self._arena = self._arena[:0].clone()
