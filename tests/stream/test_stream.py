"""Ring, disk stream and reader: order, refilling, faults, and no leftovers."""

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec.checkpoint import TensorInfo
from offspec.core.errors import ClosedError, StreamError
from offspec.stream import device_stream
from offspec.stream.arena import PAGE, Arena
from offspec.stream.device_stream import DeviceStream
from offspec.stream.direct_reader import DirectReader, ReadShape
from offspec.stream.disk_stream import DiskStream, read_unit
from offspec.stream.layout import ALIGNMENT, UnitLayout, lay_out
from offspec.stream.ring import Ring
from offspec.stream.workers import Worker
from tests.support.weight_files import restorer


def _file(folder: Path, name: str, size: int, seed: int = 0) -> tuple[Path, bytes]:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    path = folder / name
    path.write_bytes(bytes(data.numpy()))
    return path, path.read_bytes()


def _tensor(path: Path, name: str, offset: int, nbytes: int) -> TensorInfo:
    return TensorInfo(name, "U8", (nbytes,), path, offset, nbytes)


def _units(folder: Path, count: int = 5, size: int = 3 * PAGE + 77) -> tuple[list[UnitLayout], list[bytes]]:
    path, data = _file(folder, "weights", count * size + 13)
    layouts = [lay_out(f"unit {i}", [_tensor(path, f"t{i}", 13 + i * size, size)]) for i in range(count)]
    return layouts, [data[13 + i * size : 13 + (i + 1) * size] for i in range(count)]


def _stream(
    layouts: list[UnitLayout], slots: int, device_ring: bool, readers: int = 2, hosted: tuple[int, ...] = ()
) -> DiskStream | DeviceStream:
    """The disk's ring alone, or with copies to a device, with `hosted` units from RAM."""
    read = [layout for unit, layout in enumerate(layouts) if unit not in hosted]
    disk = DiskStream(read, slots, DirectReader(), shape=ReadShape(readers, 4 * PAGE)) if read else None
    if not device_ring:
        assert disk is not None
        return disk
    arenas = {unit: read_unit(layouts[unit], DirectReader()) for unit in hosted}
    return DeviceStream(layouts, arenas, disk, 2, torch.device("cpu"))


def _content(layout: UnitLayout, memory: torch.Tensor) -> bytes:
    (place, info), *_ = layout.places.values()
    return bytes(memory[place : place + info.nbytes].numpy())


def _pass(stream: DiskStream | DeviceStream, layouts: list[UnitLayout], contents: list[bytes]) -> None:
    """Check that each unit has its own bytes, and that the slot's old content does not reappear."""
    for layout, unit, content in zip(layouts, range(len(layouts)), contents, strict=True):
        memory = stream.acquire(unit)
        ((place, info),) = layout.places_on(memory.device).values()
        assert bytes(memory.cpu()[place : place + info.nbytes].numpy()) == content
        if memory.device.type == "cpu":
            memory.fill_(0xAA)
        stream.release()


def test_extents_join_neighbours_and_stay_aligned(tmp_path: Path) -> None:
    path, data = _file(tmp_path, "a", 2_000_000)
    infos = [_tensor(path, "x", 100, 5000), _tensor(path, "y", 5200, 10), _tensor(path, "z", 1_500_000, 4096)]
    layout = lay_out("unit", reversed(infos))
    assert len(layout.extents) == 2
    assert all(e.offset % PAGE == e.length % PAGE == e.start % PAGE == 0 for e in layout.extents)
    arena = read_unit(layout, DirectReader())
    for info in infos:
        place, _ = layout.places[info.name]
        assert bytes(arena.tensor[place : place + info.nbytes].numpy()) == data[info.offset :][: info.nbytes]


@pytest.mark.parametrize(
    ("slots", "readers", "device_ring"),
    [(1, 1, False), (2, 4, False), (3, 2, False), (8, 4, False), (1, 4, True), (2, 1, True), (5, 2, True)],
)
def test_units_arrive_in_order(tmp_path: Path, slots: int, readers: int, device_ring: bool) -> None:
    (layouts, contents), before = _units(tmp_path), set(threading.enumerate())
    stream = _stream(layouts, slots, device_ring, readers)
    for _ in range(4):
        _pass(stream, layouts, contents)
    moved = stream.ring.stats.bytes_moved
    assert moved >= 4 * sum(layout.extents[0].needed for layout in layouts)
    stream.close()
    stream.close()
    assert not set(threading.enumerate()) - before


@pytest.mark.parametrize("device_ring", [False, True])
def test_interrupted_pass_starts_again(tmp_path: Path, device_ring: bool) -> None:
    layouts, contents = _units(tmp_path)
    stream = _stream(layouts, 3, device_ring)
    for broken_at in (0, 1, 3):
        for unit in range(broken_at):
            stream.acquire(unit)
            stream.release()
        stream.acquire(broken_at)
        stream.abandon()  # as after an exception in the middle of a layer
        _pass(stream, layouts, contents)
    stream.close()


@pytest.mark.gpu
def test_units_are_copied_in_pieces_two_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    under_way, most = set[int](), list[int]()

    class Watched(torch.cuda.Event):
        def record(self, *args: Any) -> None:
            under_way.add(id(self))
            most.append(len(under_way))
            super().record(*args)

        def synchronize(self) -> None:
            super().synchronize()
            under_way.discard(id(self))

    layouts, contents = _units(tmp_path)  # of four pages each
    monkeypatch.setattr(device_stream, "PIECE", PAGE)
    monkeypatch.setattr(torch.cuda, "Event", Watched)
    disk = DiskStream(layouts[2:], 2, DirectReader(), shape=ReadShape(2, 4 * PAGE))
    hosted = {unit: read_unit(layouts[unit], DirectReader()) for unit in range(2)}
    with closing(DeviceStream(layouts, hosted, disk, 2, torch.device("cuda", 0))) as stream:
        for _ in range(3):
            _pass(stream, layouts, contents)
    assert max(most) == 2 and len(most) >= 3 * 4 * len(layouts)


@pytest.mark.gpu
def test_slot_is_refilled_after_its_readers_ran(tmp_path: Path) -> None:
    layouts, contents = _units(tmp_path)
    there, units, broken = torch.device("cuda", 0), (0, 1, 2, 4, 0, 2, 0), (2, 3, 4, 5)
    hosted = {unit: read_unit(layout, DirectReader()) for unit, layout in enumerate(layouts)}
    read = list[torch.Tensor]()
    with closing(DeviceStream(layouts, hosted, None, 2, there)) as stream:
        for turn, unit in enumerate(units):
            (place, info), *_ = layouts[unit].places_on(there).values()
            read.append(stream.acquire(unit)[place : place + info.nbytes].clone())
            if turn in broken:
                stream.abandon()
            else:
                stream.release()
        assert [bytes(some.cpu().numpy()) for some in read] == [contents[unit] for unit in units]


def test_large_unit_is_read_in_blocks(tmp_path: Path) -> None:
    path, data = _file(tmp_path, "big", 3 * ReadShape().block + 12345)
    layout = lay_out("unit", [_tensor(path, "t", 777, len(data) - 777)])
    stream = DiskStream([layout], 1, DirectReader())
    assert _content(layout, stream.acquire(0)) == data[777:]
    stream.release()
    stream.close()


def test_truncated_file_is_one_typed_error_and_the_stream_stays_usable(tmp_path: Path) -> None:
    layouts, contents = _units(tmp_path)
    path = layouts[0].extents[0].file
    put_back = restorer(path)
    stream = DiskStream(layouts, 2, DirectReader())
    stream.acquire(0)  # else a read may be in progress while the file changes, from offset 0
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(StreamError, match="ended early") as caught:
        for unit in (1, 2, 3, 4, 0):
            stream.release()
            stream.acquire(unit)
    assert caught.value.file == path and caught.value.offset > 0
    stream.abandon()
    put_back()  # the same inode: the descriptor sees the restored content
    _pass(stream, layouts, contents)
    stream.close()


def test_missing_file_is_named_and_files_are_closed(tmp_path: Path) -> None:
    gc.collect()  # leftovers of earlier tests may hold files
    before = len(os.listdir("/proc/self/fd"))
    layouts, _ = _units(tmp_path)
    for missing in (False, True):
        if missing:
            layouts[0].extents[0].file.unlink()
        reader = DirectReader()
        stream = DiskStream(layouts, 2, reader)
        with pytest.raises(StreamError, match="weights") if missing else nullcontext():
            stream.acquire(0)
            stream.release()
        stream.close()
        reader.close()
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("failure", [OSError(5, "Input/output error"), MemoryError("no memory")])
def test_worker_errors_reach_the_caller(failure: Exception) -> None:
    calls: Iterator[int | Exception] = iter([1, 1, failure])

    def job(slot: int) -> int:
        outcome = next(calls, 1)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    ring = Ring([f"unit {i}" for i in range(4)], 2, lambda unit: [job], workers=2, name="test")
    with pytest.raises(type(failure)):
        for unit in range(4):
            ring.acquire(unit)
            ring.release()
    ring.abandon()
    assert ring.acquire(0) in (0, 1)
    ring.release()
    ring.close()


def test_closing_wakes_waiters() -> None:
    never, raised = threading.Event(), list[BaseException]()
    ring = Ring(["unit 0"], 1, lambda unit: [lambda slot: never.wait(300) or 0], workers=1, name="test")

    def wait() -> None:
        try:
            ring.acquire(0)
        except ClosedError as error:
            raised.append(error)

    waiter, closer = threading.Thread(target=wait), threading.Thread(target=ring.close)
    waiter.start()
    closer.start()
    waiter.join(300)
    assert len(raised) == 1
    never.set()
    closer.join(300)
    assert not closer.is_alive()


@pytest.mark.parametrize("way", ["short reads", "no direct reads", "direct reads that fail"])
def test_complete_read_on_any_file_system(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, data = _file(tmp_path, "weights", 10 * PAGE + 5)
    arena, reader, open_file, preadv = Arena(11 * PAGE), DirectReader(), os.open, os.preadv

    def opened(file: Path, flags: int) -> int:
        if flags & os.O_DIRECT and way == "no direct reads":
            raise OSError(22, "Invalid argument")
        return open_file(file, flags)

    def read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if way == "direct reads that fail" and path not in reader.buffered:
            raise OSError(22, "Invalid argument")
        return preadv(descriptor, [buffers[0][: 2 * PAGE]] if way == "short reads" else buffers, offset)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "preadv", read)
    assert reader.read_into(path, 0, arena.buffer, len(data)) == len(data)
    assert bytes(arena.buffer[: len(data)]) == data
    assert way == "short reads" or reader.buffered == {path}
    reader.close()


def test_interrupted_restart_returns_no_partial_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, and a second one while the ring waits for its workers to stop."""
    filled: list[int] = []
    gate = threading.Event()

    def job(slot: int) -> int:
        gate.wait(300)
        filled.append(slot)
        return 1

    ring = Ring([f"unit {i}" for i in range(3)], 1, lambda unit: [job] * 8, workers=1, name="test")

    def interrupted() -> None:
        raise KeyboardInterrupt

    while not any(filling.running for filling in list(ring._cycle.reads.values())):
        time.sleep(0.001)
    monkeypatch.setattr(ring._pool, "_await_signal", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ring.abandon()
    monkeypatch.undo()
    gate.set()
    ring.acquire(0)
    assert len(filled) >= 8, "unit 0 was handed out before its eight jobs were done"
    ring.release()
    ring.close()


def test_is_alive_is_never_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python up to 3.12, interrupted in is_alive or join, treats a living thread as dead from then on."""

    def asked(*args: object, **kwargs: object) -> bool:
        raise AssertionError("an interrupt here would lose a living worker")

    def job(slot: int) -> int:
        time.sleep(0.02)
        return 1

    ring = Ring([f"unit {i}" for i in range(3)], 2, lambda unit: [job] * 3, workers=2, name="test")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "is_alive", asked)
        for unit in (0, 1, 2, 0):
            ring.acquire(unit)
            ring.release()
        ring.acquire(1)
        ring.abandon()
        ring.acquire(0)
        ring.release()
        real = threading.Thread.join
        patched.setattr(Worker, "join", lambda worker: real(worker) if worker.ended else asked())
        ring.close()


def _checkpoint_like(folder: Path, header: int) -> tuple[UnitLayout, bytes]:
    """A unit as in safetensors, after a header of some length, with a tensor of an odd size in it."""
    sizes = (4096, 40, 16, 6, 2048)
    path, data = _file(folder, f"header {header}", header + sum(sizes) + 5 * PAGE)
    infos, at = list[TensorInfo](), header
    for index, size in enumerate(sizes):
        at += 3 * PAGE if index == 4 else 0  # other units' tensors
        infos.append(_tensor(path, f"t{index}", at, size))
        at += size
    return lay_out("unit", infos), data


@pytest.mark.parametrize("header", [0, 8, 72, 13])
def test_copies_for_a_device_are_aligned(header: int, tmp_path: Path) -> None:
    layout, data = _checkpoint_like(tmp_path, header)
    arena, device = read_unit(layout, DirectReader()), torch.device("cuda")
    slot = torch.full((layout.nbytes_on(device),), 0xAA, dtype=torch.uint8)
    for move in layout.moves_to(device):
        slot[move.target :][: move.length] = arena.tensor[move.source :][: move.length]
    for place, info in layout.places_on(device).values():
        assert place % ALIGNMENT == 0
        assert bytes(slot[place:][: info.nbytes].numpy()) == data[info.offset :][: info.nbytes]
    assert len(slot) <= layout.nbytes
    assert layout.copy_to_device(arena.tensor, torch.device("cpu")) is arena.tensor


def test_whole_layer_is_one_copy(tmp_path: Path) -> None:
    """Whatever its header, as long as its tensors have the usual sizes of weights."""
    path, _ = _file(tmp_path, "weights", 40_000)
    infos = [_tensor(path, f"t{index}", 1000 + index * 8192, 8192) for index in range(4)]
    (move,) = lay_out("unit", infos).moves_to(torch.device("cuda"))
    assert (move.target, move.length) == (0, 4 * 8192)
