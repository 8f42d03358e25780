"""Expert store on a device: kept units, copies and reads, faults, and interrupts."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offspec.core.errors import ClosedError, StreamError
from offspec.stream import device_expert_store
from offspec.stream.arena import PAGE
from offspec.stream.device_expert_store import DeviceExpertStore
from offspec.stream.direct_reader import DirectReader, ReadShape
from offspec.stream.expert_store import ExpertStore
from offspec.stream.layout import UnitLayout
from tests.stream.expert_files import UNITS, contents_of, interrupt_at_each_line, layouts_in, write_experts

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_experts(tmp_path)


@pytest.fixture
def contents(file: Path) -> list[bytes]:
    return contents_of(file)


class StoreFactory:
    """Factory of stores that are closed after the test."""

    def __init__(self, layouts: list[UnitLayout]) -> None:
        self._layouts, self.made = layouts, list[DeviceExpertStore]()

    def __call__(self, near: int, behind: int) -> DeviceExpertStore:
        below = ExpertStore(self._layouts, behind, DirectReader(), shape=ReadShape(2, PAGE), pin=True)
        self.made.append(DeviceExpertStore(below, self._layouts, near, CUDA))
        return self.made[-1]


@pytest.fixture
def new_store(file: Path) -> Iterator[StoreFactory]:
    making = StoreFactory(layouts_in(file))
    with torch.cuda.stream(torch.cuda.current_stream(CUDA)):  # an interrupt may leave another stream current
        yield making
    for store in making.made:
        store.close()


def fetched(store: DeviceExpertStore, *units: int) -> dict[int, torch.Tensor]:
    """Return the units in the store's order: read by the device, and by the host at the end."""
    found = {}
    for unit, memory in store.fetch(units):
        ((place, info),) = store.layouts[unit].places_on(CUDA).values()
        assert unit not in found and memory.device == CUDA
        found[unit] = memory[place : place + info.nbytes].clone()
    assert sorted(found) == sorted(units)
    return {unit: values.cpu() for unit, values in found.items()}


def checked_order(store: DeviceExpertStore, contents: list[bytes], *units: int) -> list[int]:
    """Check that each unit has its own bytes; return their order."""
    found = fetched(store, *units)
    assert all(bytes(values.numpy()) == contents[unit] for unit, values in found.items())
    return list(found)


@pytest.mark.parametrize("behind", [1, UNITS])
def test_only_missing_units_are_copied_and_requested_ones_stay(
    behind: int, contents: list[bytes], new_store: StoreFactory
) -> None:
    store = new_store(4, behind)
    generator = torch.Generator().manual_seed(5)
    for _ in range(40):
        count = int(torch.randint(1, 5, (), generator=generator))
        units = torch.randperm(UNITS, generator=generator)[:count].tolist()
        before, asked = store.copy_stats.bytes_moved, store.host_store.stats.requested
        hits = set(store.cached_units) & set(units)
        came = checked_order(store, contents, *units)
        assert set(came[: len(hits)]) == hits, "what is there comes first"
        missed = set(units) - hits
        assert store.copy_stats.bytes_moved - before == sum(
            move.length for unit in missed for move in store.layouts[unit].moves_to(CUDA)
        )
        assert store.host_store.stats.requested - asked == len(missed), (
            "RAM is not asked for what is on the device"
        )
        assert set(units) <= set(store.cached_units)
    assert 0 < store.stats.hits < store.stats.requested


@pytest.mark.parametrize(("near", "behind"), [(1, 1), (2, 3), (UNITS, 2), (UNITS + 5, UNITS + 5)])
def test_units_arrive_in_waves(
    near: int, behind: int, contents: list[bytes], new_store: StoreFactory
) -> None:
    store = new_store(near, behind)
    for turn in range(3):
        checked_order(store, contents, *sorted(range(UNITS), key=lambda unit: (unit * 5 + turn) % UNITS))
    assert len(store.cached_units) == min(near, UNITS)
    assert checked_order(store, contents) == []


def test_ram_for_all_units_is_filled_immediately(contents: list[bytes], new_store: StoreFactory) -> None:
    store, told = new_store(2, UNITS), list[int]()
    store.load(told.append)
    read = store.read_stats.bytes_moved
    assert read == sum(told) == store.load_bytes == sum(layout.nbytes for layout in store.layouts)
    checked_order(store, contents, *range(UNITS))
    assert store.read_stats.bytes_moved == read and store.host_store.stats.hits == UNITS
    less = new_store(2, UNITS - 1)
    less.load(told.append)
    assert less.load_bytes == less.read_stats.bytes_moved == 0


@pytest.mark.parametrize(("near", "behind", "ahead"), [(UNITS, UNITS, 2), (3, UNITS, 2), (UNITS, 3, 1)])
def test_copies_follow_each_other_without_the_host_waiting(
    near: int, behind: int, ahead: int, contents: list[bytes], new_store: StoreFactory
) -> None:
    """While a device computes with one unit, two more are in progress, so that the link is never idle.

    One if the disk refills a slot in RAM as soon as its unit is copied.
    """
    store, size = new_store(near, behind), 0
    store.load(lambda nbytes: None)
    for number, (unit, _) in enumerate(store.fetch(range(UNITS)), 1):
        size = sum(move.length for move in store.layouts[unit].moves_to(CUDA))
        assert store.copy_stats.bytes_moved == min(number + ahead, UNITS) * size
    assert size
    checked_order(store, contents, *range(UNITS))


@pytest.mark.parametrize("behind", [2, UNITS], ids=["one copy under way", "two copies under way"])
def test_interrupt_at_any_moment(behind: int, contents: list[bytes], new_store: StoreFactory) -> None:
    """Interrupted at each line of the store's own code in turn, and a second time while it stops."""
    store = new_store(3, behind)
    store.load(lambda nbytes: None)

    def units(moment: int) -> list[int]:
        return [(moment + 2 * unit) % UNITS for unit in range(4)]

    def check(moment: int) -> None:
        first, *others = units(moment)
        checked_order(store, contents, *others, (first + 3) % UNITS)

    struck = interrupt_at_each_line(
        {device_expert_store.__file__},
        range(1, 140),
        lambda moment: fetched(store, *units(moment)),
        store.abandon,
        check,
    )
    assert struck > 60
    assert len(set(store._kept.values())) == len(store._kept) == 3, "no slot is lost"


def test_failed_copy_is_one_error_and_the_store_stays_usable(
    contents: list[bytes], new_store: StoreFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_store(3, 3)
    checked_order(store, contents, 1, 2)

    def failing(event: torch.cuda.Event) -> None:
        raise RuntimeError("CUDA error:\nunspecified launch failure")

    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda.Event, "synchronize", failing)
        with pytest.raises(StreamError, match="copying expert 5 failed: CUDA error: unspecified"):
            fetched(store, 1, 5, 2)
        store.abandon()
    assert {1, 2} <= set(store.cached_units), "what was there still is"
    checked_order(store, contents, 5, 1, 4)
    store.close()
    with pytest.raises(ClosedError):
        fetched(store, 0)
