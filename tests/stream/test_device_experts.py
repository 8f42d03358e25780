"""The store of experts on a device: what stays, what is copied and read, faults, and interrupts."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from offspec.checkpoint import TensorInfo
from offspec.core.errors import ClosedError, StreamError
from offspec.stream import device_experts
from offspec.stream.arena import PAGE
from offspec.stream.device_experts import DeviceExpertStore
from offspec.stream.direct_reader import DirectReader, ReadShape
from offspec.stream.expert_store import ExpertStore
from offspec.stream.layout import UnitLayout, lay_out

pytestmark = pytest.mark.gpu
UNITS, SIZE, START = 9, 2 * PAGE + 77, 13
CUDA = torch.device("cuda", 0)


@pytest.fixture
def contents() -> list[bytes]:
    return [bytes(torch.randint(0, 256, (SIZE,), dtype=torch.uint8).numpy()) for _ in range(UNITS)]


@pytest.fixture
def layouts(contents: list[bytes], tmp_path: Path) -> list[UnitLayout]:
    file = tmp_path / "weights"
    file.write_bytes(bytes(START) + b"".join(contents) + bytes(PAGE))
    places = [START + unit * SIZE for unit in range(UNITS)]
    return [
        lay_out(f"expert {unit}", [TensorInfo(f"t{unit}", "U8", (SIZE,), file, place, SIZE)])
        for unit, place in enumerate(places)
    ]


class Making:
    """Makes stores that are closed in the end."""

    def __init__(self, layouts: list[UnitLayout]) -> None:
        self._layouts, self.made = layouts, list[DeviceExpertStore]()

    def __call__(self, near: int, behind: int) -> DeviceExpertStore:
        below = ExpertStore(self._layouts, behind, DirectReader(), shape=ReadShape(2, PAGE), pin=True)
        self.made.append(DeviceExpertStore(below, self._layouts, near, CUDA))
        return self.made[-1]


@pytest.fixture
def new_store(layouts: list[UnitLayout]) -> Iterator[Making]:
    making = Making(layouts)
    yield making
    for store in making.made:
        store.close()


def fetched(store: DeviceExpertStore, *units: int) -> dict[int, torch.Tensor]:
    """What the store gives, in its order: read by the device, and by the host when all is done."""
    found = {}
    for unit, memory in store.fetch(units):
        ((place, info),) = store.layouts[unit].places_on(CUDA).values()
        assert unit not in found and memory.device == CUDA
        found[unit] = memory[place : place + info.nbytes].clone()
    assert sorted(found) == sorted(units)
    return {unit: values.cpu() for unit, values in found.items()}


def right(store: DeviceExpertStore, contents: list[bytes], *units: int) -> list[int]:
    """The order in which the units came, each with its own bytes."""
    found = fetched(store, *units)
    assert all(bytes(values.numpy()) == contents[unit] for unit, values in found.items())
    return list(found)


@pytest.mark.parametrize("behind", [1, 3, UNITS])
def test_only_what_is_not_there_is_copied_and_what_was_asked_for_stays(
    behind: int, contents: list[bytes], new_store: Making
) -> None:
    store = new_store(4, behind)
    generator = torch.Generator().manual_seed(5)
    for _ in range(40):
        count = int(torch.randint(1, 5, (), generator=generator))
        units = torch.randperm(UNITS, generator=generator)[:count].tolist()
        before, asked = store.copy_stats.bytes_moved, store.below.stats.asked
        hits = set(store.kept) & set(units)
        came = right(store, contents, *units)
        assert set(came[: len(hits)]) == hits, "what is there comes first"
        missed = set(units) - hits
        assert store.copy_stats.bytes_moved - before == sum(
            move.length for unit in missed for move in store.layouts[unit].moves_to(CUDA)
        )
        assert store.below.stats.asked - asked == len(missed), "RAM is not asked for what is on the device"
        assert set(units) <= set(store.kept)
    assert 0 < store.stats.hits < store.stats.asked


@pytest.mark.parametrize(("near", "behind"), [(1, 1), (2, 3), (3, 1), (UNITS, 2), (UNITS + 5, UNITS + 5)])
def test_more_units_than_slots_come_in_waves(
    near: int, behind: int, contents: list[bytes], new_store: Making
) -> None:
    store = new_store(near, behind)
    for turn in range(3):
        right(store, contents, *sorted(range(UNITS), key=lambda unit: (unit * 5 + turn) % UNITS))
    assert len(store.kept) == min(near, UNITS)
    assert right(store, contents) == []


def test_ram_that_holds_all_is_filled_at_once(contents: list[bytes], new_store: Making) -> None:
    store, told = new_store(2, UNITS), list[int]()
    store.load(told.append)
    read = store.read_stats.bytes_moved
    assert read == sum(told) == store.load_bytes == sum(layout.nbytes for layout in store.layouts)
    right(store, contents, *range(UNITS))
    assert store.read_stats.bytes_moved == read and store.below.stats.hits == UNITS
    less = new_store(2, UNITS - 1)
    less.load(told.append)
    assert less.load_bytes == less.read_stats.bytes_moved == 0


@pytest.mark.parametrize(("near", "behind", "ahead"), [(UNITS, UNITS, 2), (3, UNITS, 2), (UNITS, 3, 1)])
def test_copies_follow_each_other_without_the_host(
    near: int, behind: int, ahead: int, contents: list[bytes], new_store: Making
) -> None:
    """While a device computes with one unit, two more are under way: a link is idle while the host wakes up.

    One where the disk fills a slot in RAM again as soon as its unit is copied.
    """
    store, size = new_store(near, behind), 0
    store.load(lambda nbytes: None)
    for number, (unit, _) in enumerate(store.fetch(range(UNITS)), 1):
        size = sum(move.length for move in store.layouts[unit].moves_to(CUDA))
        assert store.copy_stats.bytes_moved == min(number + ahead, UNITS) * size
    assert size
    right(store, contents, *range(UNITS))


@pytest.mark.parametrize("behind", [2, UNITS], ids=["one copy under way", "two copies under way"])
def test_an_interrupt_may_come_at_any_moment(behind: int, contents: list[bytes], new_store: Making) -> None:
    """Struck at each line of the store's own code in turn, and a second time while it comes to rest."""
    store, left, struck = new_store(3, behind), 0, 0
    store.load(lambda nbytes: None)

    def strike(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != device_experts.__file__:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return strike

    for moment in range(1, 140):
        units, left = [(moment + 2 * unit) % UNITS for unit in range(4)], moment
        sys.settrace(strike)
        try:
            fetched(store, *units)
        except KeyboardInterrupt:
            struck += 1
            left = moment % 5 + 1
            with suppress(KeyboardInterrupt):
                store.abandon()
        finally:
            sys.settrace(None)
        right(store, contents, *units[1:], (units[0] + 3) % UNITS)
    assert struck > 60
    assert len(set(store._kept.values())) == len(store._kept) == 3, "no slot is lost"


def test_a_copy_that_fails_is_one_error_and_the_store_lives(
    contents: list[bytes], new_store: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_store(3, 3)
    right(store, contents, 1, 2)

    def failing(event: torch.cuda.Event) -> None:
        raise RuntimeError("CUDA error:\nunspecified launch failure")

    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda.Event, "synchronize", failing)
        with pytest.raises(StreamError, match="copying expert 5 failed: CUDA error: unspecified"):
            fetched(store, 1, 5, 2)
        store.abandon()
    assert {1, 2} <= set(store.kept), "what was there still is"
    right(store, contents, 5, 1, 4)
    store.close()
    with pytest.raises(ClosedError):
        fetched(store, 0)
