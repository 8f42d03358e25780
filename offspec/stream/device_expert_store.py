"""On-demand cache of units, such as experts, in device slots, filled from pinned slots in RAM.

A unit in a device slot is neither read nor copied. Copies have their own CUDA stream: two are in flight while
the device computes with earlier units, or one while slots in RAM are being refilled from disk. As in
`ExpertStore`, the only state that must survive an interrupt is `_kept`: it maps each unit to its slot while
the slot holds the complete unit, and all other slots are free or being filled.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from offspec.core.trace import OFF, Timeline
from offspec.stream.arena import round_up
from offspec.stream.expert_store import ExpertCacheStats, ExpertStore
from offspec.stream.layout import UnitLayout
from offspec.stream.unit_usage import UnitUsage
from offspec.stream.workers import BytesMoved, RingStats

_IN_FLIGHT = 2  # copies in flight, so that the next one arrives while the host still wakes up for the last
_ALIGNED = 256  # bytes: alignment of slots, as of allocator blocks


class _Copy(NamedTuple):
    """Copy in flight: its unit, its slot, and the event recorded after it."""

    unit: int
    slot: int
    whole: torch.cuda.Event


class DeviceExpertStore:
    """Cache of units on a CUDA device, on top of an `ExpertStore` in RAM.

    Args:
        host_store: Source of the units, in pinned memory if available. Closed together with this store.
        layouts: Layouts of the units as arranged in slots of `host_store`.
        slots: Maximum number of units on the device.
        device: CUDA device of the slots.
        timeline: Timeline of waits for copies.
    """

    def __init__(
        self,
        host_store: ExpertStore,
        layouts: Sequence[UnitLayout],
        slots: int,
        device: torch.device,
        timeline: Timeline = OFF,
    ) -> None:
        assert slots >= 1
        self.host_store, self.layouts, self.slots = host_store, layouts, min(slots, len(layouts))
        self.stats, self.copy_stats = ExpertCacheStats(), RingStats()
        self.usage = UnitUsage(host_store.usage.groups.tolist())
        self.device, self._timeline = device, timeline
        each = max(layout.nbytes_on(device) for layout in layouts)
        self.slot_bytes = round_up(each, _ALIGNED)
        self._arena = torch.empty(self.slot_bytes * self.slots, dtype=torch.uint8, device=device)
        self._copies = torch.cuda.Stream(device)
        # Kernels may still be reading memory that was freed and is reused for the slots.
        self._copies.wait_stream(torch.cuda.current_stream(device))
        # Events after the latest copies. Waiting for them sleeps instead of spinning.
        self._copied = deque(torch.cuda.Event(blocking=True) for _ in range(_IN_FLIGHT))
        self._used: list[torch.cuda.Event | None] = [
            None
        ] * self.slots  # after the kernels that read each slot
        self._kept: dict[int, int] = {}  # slot by unit, in order of arrival

    @property
    def nbytes(self) -> int:
        """Total bytes of the device slots."""
        return self._arena.nbytes

    @property
    def read_stats(self) -> RingStats:
        """Bytes read from disk, and seconds that `fetch` waited for reads and copies."""
        read = self.host_store.read_stats
        return RingStats(read.bytes_moved, read.wait_seconds + self.copy_stats.wait_seconds)

    @property
    def bytes_moved(self) -> BytesMoved:
        """Bytes copied to the device, and bytes read."""
        return BytesMoved(self.copy_stats.bytes_moved, self.host_store.bytes_moved.read)

    @property
    def unpinned_bytes(self) -> int:
        """Bytes of RAM that are copied from but could not be pinned."""
        return self.host_store.unpinned_bytes

    @property
    def load_bytes(self) -> int:
        """Bytes that `load` reads."""
        return self.host_store.load_bytes

    @property
    def cached_units(self) -> tuple[int, ...]:
        """Units in device slots, in order of arrival."""
        return tuple(self._kept)

    def load(self, progress: Callable[[int], None]) -> None:
        """Load units into RAM with `ExpertStore.load`."""
        self.host_store.load(progress)

    def restore_usage(self, shares: Sequence[float]) -> None:
        """Restore usage as in `ExpertStore.restore_usage`; device copies are made on demand."""
        self.usage.shares[:] = shares
        self.host_store.restore_usage(shares)

    def fetch(
        self, units: Sequence[int], counts: Sequence[int] = (), rows: int = 1
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each unit with its slot, uint8 [slot bytes], which is valid until the next iteration.

        Units on the device come first, while the first of the others is copied or read. Kernels that are
        queued on the current stream before the next iteration may read the slot.

        Args:
            units: Distinct units of one group.
            counts: Number of rows that use each unit. Default 1 each.
            rows: Number of rows of the pass. Default 1.

        Raises:
            StreamError: A read or a copy failed.
            CheckpointError: A checksum does not match.
            ClosedError: The store was closed.
        """
        ready = [unit for unit in units if unit in self._kept]
        missing = [unit for unit in units if unit not in self._kept]
        self.stats.requested += len(units)
        self.stats.hits += len(ready)
        asking = dict(zip(units, counts or [1] * len(units), strict=True))
        self.usage.note(units, list(asking.values()), rows)
        leaving = self.usage.eviction_order(self._kept, asking, len(missing) - (self.slots - len(self._kept)))
        coming = self.host_store.fetch(missing, [asking[unit] for unit in missing], rows)
        held = [self.host_store.holds(unit) for unit in missing]
        if not any(held):  # compute with the cached units while the first one is read
            yield from self._hand_out(ready)
            ready = []
        # A slot in RAM may be refilled at the next iteration, unless nothing is read.
        most, in_flight = _IN_FLIGHT if all(held) else 1, deque[_Copy]()
        for unit, memory in coming:
            slot = self._take_slot(ready, leaving, in_flight)
            while slot is None:
                if not ready:
                    ready = [self._wait_for_oldest(in_flight)]
                yield from self._hand_out(ready)
                slot, ready = self._take_slot((), leaving, in_flight), []
            in_flight.append(self._copy(unit, memory, slot))
            yield from self._hand_out(ready)
            ready = [self._wait_for_oldest(in_flight)] if len(in_flight) == most else []
        yield from self._hand_out(ready)
        while in_flight:
            yield from self._hand_out([self._wait_for_oldest(in_flight)])

    def _wait_for_oldest(self, in_flight: deque[_Copy]) -> int:
        """Wait for the oldest copy in flight and return its unit."""
        copy = in_flight.popleft()
        self._wait(copy)
        self._kept[copy.unit] = copy.slot
        return copy.unit

    def _hand_out(self, units: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        for unit in units:
            slot = self._kept[unit]
            try:
                yield unit, self._arena[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]
            finally:
                self._used[slot] = torch.cuda.current_stream(self.device).record_event()

    def _take_slot(
        self, pinned: Collection[int], leaving: Iterator[int], in_flight: Collection[_Copy]
    ) -> int | None:
        """Return a free slot, evicting a unit if necessary; None if all slots are in use."""
        if len(self._kept) + len(in_flight) < self.slots:
            taken = {*self._kept.values(), *(copy.slot for copy in in_flight)}
            return next(slot for slot in range(self.slots) if slot not in taken)
        unit = next(leaving, None)
        if unit is None:  # in waves, evict a unit that was already handed out
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
        """Drop unfinished reads after an error or an interrupt; cached units stay."""
        self.host_store.abandon()

    def close(self) -> None:
        """Stop reading and copying. May be called twice."""
        self._kept.clear()
        try:
            self._copies.synchronize()  # otherwise memory is unpinned and freed during a copy
        finally:
            self.host_store.close()
            self._arena = self._arena[:0].clone()
