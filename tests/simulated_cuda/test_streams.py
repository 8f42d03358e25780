"""Streams: reads without a wait return wrong numbers, reads after a wait correct ones."""

from threading import Event, Thread
from typing import Any

import pytest
import torch

from offspec.stream.arena import Arena

pytestmark = pytest.mark.gpu


def numbers(start: int, count: int = 6) -> torch.Tensor:
    return torch.arange(start, start + count, dtype=torch.float32)


@pytest.mark.parametrize("waits", [True, False])
def test_stream_without_a_wait_reads_old_values(late: Any, waits: bool) -> None:
    given = numbers(0).cuda()
    torch.cuda.synchronize()
    aside = torch.cuda.Stream()
    given += 10
    with torch.cuda.stream(aside):
        if waits:
            aside.wait_stream(torch.cuda.default_stream())
        doubled = given * 2
    aside.synchronize()
    assert torch.equal(doubled.cpu(), 2 * (numbers(10) if waits else numbers(0)))


@pytest.mark.parametrize("waits", [True, False])
def test_event_marks_when_a_slot_may_be_refilled(late: Any, waits: bool) -> None:
    slot, copies = numbers(0).cuda(), torch.cuda.Stream()
    late.settle()
    used = slot * 2
    done = torch.cuda.current_stream().record_event()
    with torch.cuda.stream(copies):
        if waits:
            copies.wait_event(done)
        slot.copy_(numbers(100).pin_memory(), non_blocking=True)
    copies.synchronize()
    assert torch.equal(used.cpu(), 2 * numbers(0 if waits else 100))


@pytest.mark.parametrize("waits", [True, False])
def test_pinned_memory_is_read_when_the_copy_runs(late: Any, waits: bool) -> None:
    room, there = numbers(0).pin_memory(), torch.empty(6, device="cuda")
    there.copy_(room, non_blocking=True)
    if waits:
        torch.cuda.current_stream().synchronize()
    room.copy_(numbers(50))
    assert torch.equal(there.cpu(), numbers(0 if waits else 50))


def test_non_blocking_copies_are_late_only_in_pinned_memory(late: Any) -> None:
    room, there = numbers(0), torch.empty(6, device="cuda")
    there.copy_(room, non_blocking=True)
    room.copy_(numbers(50))
    assert torch.equal(there.cpu(), numbers(0)), "other memory is read before the call returns"
    given = numbers(7).cuda()
    room = torch.zeros(6).pin_memory()
    room.copy_(given, non_blocking=True)
    assert torch.equal(room, torch.zeros(6))
    torch.cuda.synchronize()
    assert torch.equal(room, numbers(7))


@pytest.mark.parametrize("told", [False, True])
def test_freed_memory_is_reused(late: Any, told: bool) -> None:
    """A second stream still reads it, and the result depends on whether the allocator was informed."""
    given, aside = numbers(0).cuda(), torch.cuda.Stream()
    late.settle()
    with torch.cuda.stream(aside):
        doubled = given * 2
    if told:
        given.record_stream(aside)
    del given
    other = numbers(30).cuda()
    aside.synchronize()
    assert torch.equal(doubled.cpu(), 2 * (numbers(0) if told else other.cpu()))


@pytest.mark.parametrize("waits", [None, "host", "owner"])
def test_memory_freed_during_a_copy_is_reported(late: Any, waits: str | None) -> None:
    room, there, copies = numbers(0).pin_memory(), numbers(7).cuda(), torch.cuda.Stream()
    with torch.cuda.stream(copies):
        there.copy_(room, non_blocking=True)
    if waits == "host":
        copies.synchronize()
    if waits == "owner":
        torch.cuda.current_stream().wait_stream(copies)
    del there
    told, late.misused[:] = late.misused[:], []
    assert told == ([] if waits else [f"copy to device in stream {copies.stream_id} of cuda:0"])


@pytest.mark.parametrize("waits", [True, False])
def test_memory_unregistered_during_a_copy_is_reported(late: Any, waits: bool) -> None:
    room, there = Arena(24, pin=True), torch.zeros(24, dtype=torch.uint8, device="cuda")
    there.copy_(room.tensor[:24], non_blocking=True)
    if waits:
        torch.cuda.synchronize()
    room.close()
    told, late.misused[:] = late.misused[:], []
    assert told == ([] if waits else ["copy to device in stream 0 of cuda:0"])


def test_copy_of_another_thread_is_not_complete_yet(late: Any) -> None:
    """Events and streams report it, and a wait ends with the copy, whichever thread runs it."""
    began, goes_on, order = Event(), Event(), list[str]()

    def copy() -> None:
        began.set()
        assert goes_on.wait(60)
        order.append("copied")

    def wait() -> None:
        copied.synchronize()
        order.append("waited")

    late.launch("copy", copy, 0)
    copied = torch.cuda.current_stream().record_event()
    threads = [Thread(target=copied.synchronize), Thread(target=wait)]
    threads[0].start()
    assert began.wait(60)
    threads[1].start()
    there = copied.query(), torch.cuda.current_stream().query()
    goes_on.set()
    for thread in threads:
        thread.join()
    assert there == (False, False) and order == ["copied", "waited"]


def test_memory_is_released_once_nothing_reads_it(late: Any) -> None:
    """As in torch: earlier tasks may read memory that its owner has released."""
    table, places = numbers(7).cuda(), torch.zeros(1 << 22, dtype=torch.long, device="cuda")
    torch.cuda.synchronize()
    picked = table.index_select(0, places)
    del places
    torch.cuda.empty_cache()
    torch.empty(1 << 22, dtype=torch.long, device="cuda")
    assert (picked == 7).all()


def test_waits_are_counted_by_cause_and_line(late: Any) -> None:
    given = numbers(0).pin_memory().to("cuda", non_blocking=True)
    assert not late.waits
    total = given.sum().item()
    torch.cuda.synchronize()
    causes = dict(late.waits.keys())
    assert total == 15 and causes.keys() == {"item", "cuda.synchronize"}
    assert causes["item"].startswith("tests/simulated_cuda/test_streams.py:")
    assert late.counts["launches"] == 2 and late.copied["host to device"] == 24


def test_policy_sizes_computes_nothing(late: Any) -> None:
    late.scheduler.policy = "sizes"
    given = torch.ones(1000, device="cuda")
    held = torch.cuda.memory_allocated()
    product = given * 3
    assert torch.cuda.memory_allocated() - held == 4096 and product.cpu().eq(0).all()
