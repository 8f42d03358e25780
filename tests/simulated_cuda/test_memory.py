"""Model of torch's caching allocator; needs no device."""

from itertools import pairwise

import pytest
import torch

from tests.support.simulated_cuda.memory import Allocator, Block

MB = 1 << 20


def allocator(expandable: bool = False, total: int = 100 * MB) -> Allocator:
    return Allocator(total, expandable=expandable, poison=False)


def test_small_and_medium_blocks_share_segments() -> None:
    memory = allocator()
    memory.allocate(1000, 0)
    memory.allocate(MB, 0)
    assert (memory.now.asked, memory.now.allocated, memory.now.reserved) == (MB + 1000, MB + 1024, 2 * MB)
    memory.allocate(MB + 1, 0)
    assert memory.now.reserved == 22 * MB
    memory.allocate(11 * MB, 0)
    assert memory.now.reserved == 22 * MB, "there is room in the segment of twenty"
    memory.allocate(15 * MB + 1, 0)
    assert memory.now.reserved == 38 * MB, "a segment of its own, in steps of two"


@pytest.mark.parametrize("expandable", [False, True])
def test_free_neighbours_merge_and_the_limit_is_enforced(expandable: bool) -> None:
    memory = allocator(expandable)
    first, second, third = (memory.allocate(3 * MB, 0) for _ in range(3))
    held = memory.now.reserved
    memory.free(first)
    memory.free(second)
    assert memory.allocate(6 * MB, 0).start == first.start and memory.now.reserved == held
    assert third.used
    memory = allocator(expandable)
    kept = memory.allocate(40 * MB, 0)
    memory.free(memory.allocate(40 * MB, 1))
    assert memory.now.reserved == 80 * MB
    memory.allocate(60 * MB, 0)
    assert memory.now.reserved == 100 * MB and kept.used, "the other stream's block was given back"
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        memory.allocate(2 * MB, 0)


def test_expandable_segments_grow_without_gaps() -> None:
    """Blocks that each take a little more than the last: no old one fits, and none can be released."""
    reserved = []
    for expandable in (False, True):
        memory, last = allocator(expandable, 1000 * MB), None
        for size in range(30, 60, 2):
            block: Block = memory.allocate(size * MB, 0)
            if last is not None:
                memory.free(last)
            last = block
        reserved.append(memory.now.reserved)
    assert reserved[1] <= 200 * MB < reserved[0]


@pytest.mark.parametrize("expandable", [False, True])
def test_blocks_never_overlap(expandable: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    memory, live = allocator(expandable, 300 * MB), list[Block]()
    for _ in range(300):
        if live and torch.rand((), generator=generator) < 0.45:
            memory.free(live.pop(int(torch.randint(len(live), (), generator=generator))))
        else:
            size = int(10 ** (7 * float(torch.rand((), generator=generator))))
            live.append(memory.allocate(size, int(torch.randint(2, (), generator=generator))))
        if torch.rand((), generator=generator) < 0.02:
            memory.release()
        spans = sorted((block.start, block.start + block.size) for block in live)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert memory.now.allocated == sum(block.size for block in live) <= memory.now.reserved
        assert memory.now.asked == sum(block.asked for block in live)
