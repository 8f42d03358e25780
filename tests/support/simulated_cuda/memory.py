"""A model of torch's caching allocator for CUDA: addresses of tensors, and memory reserved on a device.

Sizes are those of torch's CUDACachingAllocator with its default settings, or with expandable segments. A lane
holds the blocks of one pool (a graph's or the common one), one stream, and one size class, small or large.
"""

import mmap
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

UNIT = 512  # every block is a multiple of it
SMALL = 1 << 20  # the largest request that shares a segment of SMALL_SEGMENT
SMALL_SEGMENT = 2 << 20  # also what larger segments are multiples of
MEDIUM = 10 << 20  # requests below it share a segment of MEDIUM_SEGMENT
MEDIUM_SEGMENT = 20 << 20
_ADDRESSES = 32  # times the device's memory: as on a device, address space is ample
_NORESERVE = 0x4000  # Linux: reserves addresses without memory; Python has no name for it before 3.13


class Lane(NamedTuple):
    pool: Hashable
    stream: int
    small: bool


@dataclass(slots=True, eq=False)
class Block:
    """Bytes [start, start + size) of a lane, between its neighbours of the same segment."""

    lane: Lane
    start: int
    size: int
    used: bool = False
    mapped: bool = True  # of an expandable segment: whether these addresses are backed by memory
    asked: int = 0
    before: "Block | None" = None
    after: "Block | None" = None


@dataclass(slots=True)
class Figures:
    """Bytes requested by tensors, bytes of their blocks, and bytes reserved on the device."""

    asked: int = 0
    allocated: int = 0
    reserved: int = 0


@dataclass(slots=True)
class Allocator:
    """The blocks of one device with `total` bytes.

    limit: bytes that may be reserved. expandable: segments that grow, one per lane, instead of new ones.
        poison: fill new memory with NaN. settle: runs all pending tasks of the device before memory is
        released that some may still read. pools: number of graphs that use each pool; the memory of a pool
        in use is not released.
    """

    total: int
    expandable: bool = False
    poison: bool = True
    settle: Callable[[], object] = lambda: None
    limit: int = field(init=False)
    now: Figures = field(default_factory=Figures)
    peak: Figures = field(default_factory=Figures)
    pools: Counter[Hashable] = field(default_factory=Counter)
    memory: mmap.mmap = field(init=False)
    bytes: torch.Tensor = field(init=False)
    _free: dict[Lane, list[Block]] = field(default_factory=dict)
    _unmapped: dict[Lane, list[Block]] = field(default_factory=dict)
    _bases: dict[Lane, int] = field(default_factory=dict)  # start of a lane's expandable segment
    _holes: list[tuple[int, int]] = field(init=False)  # (start, bytes) of addresses not in use

    def __post_init__(self) -> None:
        self.limit = self.total
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self.memory = mmap.mmap(-1, self.total * _ADDRESSES, flags=flags)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self._holes = [(0, self.total * _ADDRESSES)]

    def allocate(self, size: int, stream: int, pool: Hashable = None) -> Block:
        """Return a block for `size` bytes. Raises torch.OutOfMemoryError, as torch does."""
        rounded = max(_up(size, UNIT), UNIT)
        lane = Lane(pool, stream, rounded <= SMALL)
        block = self._best(lane, rounded) or self._more(lane, rounded)
        self._of(self._free, lane).remove(block)
        left = block.size - rounded
        if left >= UNIT if lane.small or self.expandable else left > SMALL:
            self._of(self._free, lane).append(self._cut(block, rounded))
        block.used, block.asked = True, size
        self.now.asked += size
        self.now.allocated += block.size
        self._note_peaks()
        return block

    def free(self, block: Block) -> None:
        """Free the block at once, even if something still reads it."""
        self.now.asked -= block.asked
        self.now.allocated -= block.size
        block.used = False
        self._of(self._free, block.lane).append(self._joined(block))

    def release(self) -> None:
        """Release memory that is reserved and unused, except for the pools of graphs."""
        self.settle()
        for lane, free in self._free.items():
            if not self.pools[lane.pool]:
                for block in tuple(free):
                    self._release(block)

    def has_pool(self, pool: Hashable) -> bool:
        """Return whether memory is reserved for a graph's pool."""
        return any(lane.pool == pool and free for lane, free in self._free.items())

    def reset_peaks(self) -> None:
        self.peak = Figures(self.now.asked, self.now.allocated, self.now.reserved)

    def _of(self, kind: dict[Lane, list[Block]], lane: Lane) -> list[Block]:
        return kind.setdefault(lane, [])

    def _best(self, lane: Lane, size: int) -> Block | None:
        fitting = [block for block in self._of(self._free, lane) if block.size >= size]
        return min(fitting, key=lambda block: (block.size, block.start), default=None)

    def _more(self, lane: Lane, size: int) -> Block:
        """Reserve new memory for a free block of `size` bytes or more."""
        for again in (False, True):
            found = self._grown(lane, size) if self.expandable else self._segment(lane, size)
            if found is not None:
                return found
            if not again:
                self.release()
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {size / 2**20:.2f} MiB. Reserved are "
            f"{self.now.reserved / 2**20:.2f} MiB, {self.now.allocated / 2**20:.2f} MiB of them in use; the "
            f"limit is {self.limit / 2**20:.2f} MiB."
        )

    def _segment(self, lane: Lane, size: int) -> Block | None:
        whole = SMALL_SEGMENT if lane.small else MEDIUM_SEGMENT if size < MEDIUM else _up(size, SMALL_SEGMENT)
        if not self._reserve(whole):
            return None
        block = self._filled(Block(lane, self._addresses(whole), whole))
        self._of(self._free, lane).append(block)
        return block

    def _grown(self, lane: Lane, size: int) -> Block | None:
        """Extend the lane's expandable segment."""
        unmapped = self._of(self._unmapped, lane)
        if lane not in self._bases:
            room = _up(self.total + self.total // 8, MEDIUM_SEGMENT)
            self._bases[lane] = self._addresses(room)
            unmapped.append(Block(lane, self._bases[lane], room, mapped=False))
        for block in unmapped:
            last = block.before if block.before is not None and not block.before.used else None
            missing = size - (last.size if last is not None else 0)
            added = min(_up(missing, SMALL_SEGMENT if lane.small else MEDIUM_SEGMENT), block.size)
            if added < missing:
                continue
            if not self._reserve(added):
                return None
            unmapped.remove(block)
            if added < block.size:
                unmapped.append(self._cut(block, added))
            self._filled(block).mapped = True
            found = self._joined(block)
            self._of(self._free, lane).append(found)
            return found
        return None

    def _filled(self, block: Block) -> Block:
        """Fill fresh memory with NaN in every float format."""
        if self.poison:
            self.bytes[block.start : block.start + block.size].fill_(0xFF)
        return block

    def _reserve(self, size: int) -> bool:
        if self.now.reserved + size > self.limit:
            return False
        self.now.reserved += size
        self._note_peaks()
        return True

    def _release(self, block: Block) -> None:
        free = self._of(self._free, block.lane)
        if block.lane not in self._bases:
            if block.before is None and block.after is None:
                free.remove(block)
                self._holes.append((block.start, block.size))
                self._unreserve(block)
            return
        page, base = SMALL_SEGMENT if block.lane.small else MEDIUM_SEGMENT, self._bases[block.lane]
        start = base + _up(block.start - base, page)
        end = base + (block.start + block.size - base) // page * page
        if start >= end:
            return
        free.remove(block)
        if start > block.start:
            free.append(block)
            block = self._cut(block, start - block.start)
        if end < block.start + block.size:
            free.append(self._cut(block, end - block.start))
        self._unreserve(block)
        block.mapped = False
        self._unmapped[block.lane].append(self._joined(block))

    def _unreserve(self, block: Block) -> None:
        self.now.reserved -= block.size
        first = _up(block.start, mmap.PAGESIZE)
        self.memory.madvise(mmap.MADV_DONTNEED, first, block.size - (first - block.start))

    def _cut(self, block: Block, size: int) -> Block:
        """Split off the part after the first `size` bytes, as a block of its own, in no list."""
        rest = Block(block.lane, block.start + size, block.size - size, mapped=block.mapped)
        rest.before, rest.after, block.size = block, block.after, size
        if block.after is not None:
            block.after.before = rest
        block.after = rest
        return rest

    def _joined(self, block: Block) -> Block:
        """Merge the block with its free neighbours of the same kind, which leave their list."""
        kind = self._free if block.mapped else self._unmapped
        for first, second in ((block.before, block), (block, block.after)):
            if first is None or second is None:
                continue
            other = second if first is block else first
            if other.used or other.mapped != block.mapped:
                continue
            self._of(kind, block.lane).remove(other)
            first.size, first.after = first.size + second.size, second.after
            if second.after is not None:
                second.after.before = first
            if second is block:
                return self._joined(first)
        return block

    def _addresses(self, size: int) -> int:
        for index, (start, room) in enumerate(self._merged_holes()):
            if room >= size:
                self._holes[index] = (start + size, room - size)
                return start
        raise AssertionError("addresses of the simulated device are used up")

    def _merged_holes(self) -> Iterator[tuple[int, int]]:
        merged: list[tuple[int, int]] = []
        for start, room in sorted(self._holes):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            elif room:
                merged.append((start, room))
        self._holes = merged
        return iter(merged)

    def _note_peaks(self) -> None:
        for name in ("asked", "allocated", "reserved"):
            setattr(self.peak, name, max(getattr(self.peak, name), getattr(self.now, name)))


def _up(size: int, to: int) -> int:
    return -(-size // to) * to
