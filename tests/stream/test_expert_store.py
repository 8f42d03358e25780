"""Expert store: kept and evicted units, waves, faults, and interrupts at any moment."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec.checkpoint.checksum import FileHasher
from offspec.core.errors import CheckpointError, ClosedError, StreamError
from offspec.stream import expert_store, workers
from offspec.stream.arena import PAGE
from offspec.stream.direct_reader import DirectReader, ReadShape
from offspec.stream.expert_store import ExpertStore
from tests.stream.expert_files import (
    SIZE,
    START,
    UNITS,
    contents_of,
    interrupt_at_each_line,
    layouts_in,
    write_experts,
)
from tests.support.weight_files import restorer


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_experts(tmp_path)


@pytest.fixture
def made() -> Iterator[list[ExpertStore]]:
    """Stores that are closed after the test."""
    every = list[ExpertStore]()
    yield every
    for store in every:
        store.close()


def new_store(made: list[ExpertStore], file: Path, slots: int, depth: int = 2, **more: Any) -> ExpertStore:
    store = ExpertStore(
        layouts_in(file), slots, more.pop("reader", DirectReader()), shape=ReadShape(depth, PAGE)
    )
    made.append(store)
    return store


def fetched(store: ExpertStore, *units: int) -> dict[int, bytes]:
    """Return the units in the store's order, and overwrite them: no later read may use that memory."""
    found = {}
    for unit, memory in store.fetch(units):
        ((place, info),) = store.layouts[unit].places.values()
        assert unit not in found
        found[unit] = bytes(memory[place : place + info.nbytes].numpy())
    assert sorted(found) == sorted(units)
    return found


def checked_order(store: ExpertStore, contents: list[bytes], *units: int) -> list[int]:
    """Check that each unit has its own bytes; return their order."""
    found = fetched(store, *units)
    assert all(content == contents[unit] for unit, content in found.items())
    return list(found)


def share_of(store: ExpertStore) -> Callable[[int], float]:
    return lambda unit: float(store.usage.shares[unit])


def test_unit_needed_latest_is_evicted(file: Path, made: list[ExpertStore]) -> None:
    contents, store, kept = contents_of(file), new_store(made, file, 4), set[int]()
    generator = torch.Generator().manual_seed(5)
    for _ in range(60):
        count = int(torch.randint(1, 5, (), generator=generator))
        units = torch.randperm(UNITS, generator=generator)[:count].tolist()
        before, hits = store.read_stats.bytes_moved, kept & set(units)
        came = checked_order(store, contents, *units)
        assert set(came[: len(hits)]) == hits, "what is there comes first"
        assert store.read_stats.bytes_moved - before == sum(
            store.layouts[unit].nbytes for unit in set(units) - hits
        )
        stayed, others = set(store.cached_units) - set(units), sorted(map(share_of(store), kept - hits))
        assert set(units) <= set(store.cached_units) and stayed <= kept
        assert sorted(map(share_of(store), stayed)) == others[max(len(units) + len(others) - 4, 0) :]
        kept = set(store.cached_units)
    assert 0 < store.stats.hits < store.stats.requested


@pytest.mark.parametrize(
    ("slots", "depth"), [(1, 1), (1, 4), (2, 1), (3, 4), (UNITS - 1, 4), (UNITS, 1), (UNITS + 5, 4)]
)
def test_units_arrive_in_waves(file: Path, made: list[ExpertStore], slots: int, depth: int) -> None:
    contents, store = contents_of(file), new_store(made, file, slots, depth)
    for turn in range(4):
        units = sorted(range(UNITS), key=lambda unit: (unit * 5 + turn) % UNITS)
        before = store.read_stats.bytes_moved
        checked_order(store, contents, *units)
        read = (store.read_stats.bytes_moved - before) / sum(layout.nbytes for layout in store.layouts)
        assert turn or read == 1
        assert turn == 0 or read < 1, "what was there is not read again"
    assert len(store.cached_units) == min(slots, UNITS)
    assert checked_order(store, contents) == []


def test_kept_units_are_returned_while_others_are_read(
    file: Path, made: list[ExpertStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    contents, store = contents_of(file), new_store(made, file, 4)
    checked_order(store, contents, 0, 1)
    gate, real = threading.Event(), os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: gate.wait(300) and real(*args))
    given = store.fetch((2, 0, 3, 1))
    assert [next(given)[0], next(given)[0]] == [0, 1]
    gate.set()
    assert {unit for unit, _ in given} == {2, 3}


def settled(store: ExpertStore) -> set[int]:
    """Return the kept units once all pending reads are done."""
    while any(not filling.is_complete for filling in list(store._pool.round.reads.values())) or store._ahead:
        time.sleep(0.001)
    assert list(store.fetch(())) == []
    return set(store.cached_units)


def test_read_ahead_uses_free_slots_only(file: Path, made: list[ExpertStore]) -> None:
    contents, store = contents_of(file), new_store(made, file, 5)
    checked_order(store, contents, 0)
    store.prefetch([4, 0, 7])
    assert settled(store) == {0, 4, 7}
    store.prefetch([1, 2, 3, 5])
    assert settled(store) == {0, 4, 7, 1, 2}, "the first of them, as far as there is room"
    before = store.read_stats.bytes_moved
    checked_order(store, contents, 0, 4, 7, 1, 2)
    assert store.read_stats.bytes_moved == before


@pytest.mark.parametrize("depth", [1, 4])
def test_read_ahead_during_requests(file: Path, made: list[ExpertStore], depth: int) -> None:
    contents, generator = contents_of(file), torch.Generator().manual_seed(depth)
    for _ in range(8):
        store = new_store(made, file, 6, depth)
        store.prefetch(torch.randperm(UNITS, generator=generator).tolist())
        for _ in range(4):
            checked_order(store, contents, *torch.randperm(UNITS, generator=generator)[:3].tolist())
        settled(store)
        assert {*store._kept.values(), *store._pool.round.free} == set(range(6))


def test_abandoned_fetch_is_harmless(file: Path, made: list[ExpertStore]) -> None:
    contents, store = contents_of(file), new_store(made, file, 3)
    for start in range(UNITS):
        left = store.fetch([(start + i) % UNITS for i in range(5)])
        next(left)
        del left
        checked_order(store, contents, *((start + 3 * i) % UNITS for i in range(3)))


@pytest.mark.parametrize("slots", [1, 3])
def test_interrupt_at_any_moment(file: Path, made: list[ExpertStore], slots: int) -> None:
    """Interrupted at each line of the store's own code in turn, and a second time while it stops."""
    contents, store = contents_of(file), new_store(made, file, slots)

    def units(moment: int) -> list[int]:
        return [(moment + 2 * i) % UNITS for i in range(4)]

    def check(moment: int) -> None:
        first, *others = units(moment)
        checked_order(store, contents, *others, (first + slots) % UNITS)
        store.prefetch(range(moment % 5, UNITS))

    struck = interrupt_at_each_line(
        {expert_store.__file__, workers.__file__},
        range(1, 400),
        lambda moment: fetched(store, *units(moment)),
        store.abandon,
        check,
    )
    assert struck > 100
    settled(store)
    assert {*store._kept.values(), *store._pool.round.free} == set(range(slots)), "no slot is lost"


@pytest.mark.parametrize("failure", [OSError(5, "Input/output error"), MemoryError("no memory")])
def test_failed_read_is_one_error_and_the_store_stays_usable(
    file: Path, made: list[ExpertStore], failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents, store = contents_of(file), new_store(made, file, 3)
    checked_order(store, contents, 1, 2)
    real = os.preadv

    def failing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if offset // PAGE == (START + 5 * SIZE) // PAGE:
            raise failure
        return real(descriptor, buffers, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", failing)
        for _ in range(2):
            with pytest.raises(StreamError) as caught:
                fetched(store, 1, 5, 2)
            assert caught.value.file == file
            store.abandon()
    assert {1, 2} <= set(store.cached_units), "what was there still is"
    checked_order(store, contents, 5, 1, 4)


def test_truncated_expert_is_one_error_and_the_store_stays_usable(
    file: Path, made: list[ExpertStore]
) -> None:
    contents, store, restore_file = contents_of(file), new_store(made, file, 2), restorer(file)
    checked_order(store, contents, 0)
    os.truncate(file, START + 6 * SIZE + 10)
    with pytest.raises(StreamError, match="ended early") as caught:
        fetched(store, 6)
    assert caught.value.file == file and caught.value.offset > 0
    store.abandon()
    restore_file()  # the same inode: the descriptor sees the restored content
    checked_order(store, contents, *range(UNITS))


def test_bytes_are_checked_on_first_read(file: Path, made: list[ExpertStore]) -> None:
    contents = contents_of(file)
    summing = FileHasher(START)
    summing.add(memoryview(file.read_bytes()))
    known = summing.result()
    store = new_store(made, file, 2, reader=DirectReader({file: known}, "pack it again"))
    checked_order(store, contents, 3, 4)
    spoilt = bytearray(file.read_bytes())
    spoilt[START + 7 * SIZE] ^= 1
    file.write_bytes(spoilt)
    store = new_store(made, file, 2, reader=DirectReader({file: known}, "pack it again"))
    with pytest.raises(CheckpointError, match="pack it again"):
        fetched(store, 7)


def test_closing_wakes_waiters(file: Path, made: list[ExpertStore], monkeypatch: pytest.MonkeyPatch) -> None:
    store, gate, real = new_store(made, file, 2), threading.Event(), os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: gate.wait(300) and real(*args))
    raised, begun = list[BaseException](), threading.Event()

    def wait() -> None:
        begun.set()
        try:
            fetched(store, 0, 1, 2)
        except ClosedError as error:
            raised.append(error)

    waiter, closer = threading.Thread(target=wait), threading.Thread(target=store.close)
    waiter.start()
    begun.wait(300)
    while not store._pool.round.reads:
        time.sleep(0.001)
    closer.start()
    waiter.join(300)
    assert len(raised) == 1
    gate.set()
    closer.join(300)
    assert not closer.is_alive()
    store.close()
    with pytest.raises(ClosedError):
        fetched(store, 0)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("offspec-read expert")]
