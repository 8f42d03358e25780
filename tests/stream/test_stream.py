"""The ring, the disk stream and the reader: order, refilling, faults, and that nothing is left behind."""

import gc
import os
import threading
import time
from collections.abc import Iterator
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
from tests.support.weight_files import as_it_is


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
    """The disk's ring alone, or with copies behind it, `hosted` units among them from RAM."""
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


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("readers", [1, 2, 4])
@pytest.mark.parametrize("device_ring", [False, True])
def test_units_come_in_order_pass_after_pass(
    tmp_path: Path, slots: int, readers: int, device_ring: bool
) -> None:
    (layouts, contents), before = _units(tmp_path), set(threading.enumerate())
    stream = _stream(layouts, slots, device_ring, readers)
    for _ in range(4):
        for unit, content in enumerate(contents):
            memory = stream.acquire(unit)
            assert _content(layouts[unit], memory) == content
            memory.fill_(0xAA)  # what the slot held must not come back
            stream.release()
    moved = stream.ring.stats.bytes_moved
    assert moved >= 4 * sum(layout.extents[0].needed for layout in layouts)
    stream.close()
    stream.close()
    assert not set(threading.enumerate()) - before


@pytest.mark.parametrize("device_ring", [False, True])
def test_a_pass_broken_off_starts_anew(tmp_path: Path, device_ring: bool) -> None:
    layouts, contents = _units(tmp_path)
    stream = _stream(layouts, 3, device_ring)
    for broken_at in (0, 1, 3):
        for unit in range(broken_at):
            stream.acquire(unit)
            stream.release()
        stream.acquire(broken_at)
        stream.abandon()  # as after an exception in the middle of a layer
        for unit, content in enumerate(contents):
            assert _content(layouts[unit], stream.acquire(unit)) == content
            stream.release()
    stream.close()


@pytest.mark.gpu
def test_units_are_copied_in_pieces_two_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    there = torch.device("cuda", 0)
    stream = DeviceStream(layouts, hosted, disk, 2, there)
    try:
        for _ in range(3):
            for unit, content in enumerate(contents):
                (place, info), *_ = layouts[unit].places_on(there).values()
                assert bytes(stream.acquire(unit).cpu()[place : place + info.nbytes].numpy()) == content
                stream.release()
    finally:
        stream.close()
    assert max(most) == 2 and len(most) >= 3 * 4 * len(layouts)


@pytest.mark.gpu
def test_a_slot_is_refilled_when_those_that_read_it_have_run(tmp_path: Path) -> None:
    """Also the slot that was held when a pass was broken off."""
    layouts, contents = _units(tmp_path)
    there, units, broken = torch.device("cuda", 0), (0, 1, 2, 4, 0, 2, 0), (2, 3, 4, 5)
    hosted = {unit: read_unit(layout, DirectReader()) for unit, layout in enumerate(layouts)}
    stream = DeviceStream(layouts, hosted, None, 2, there)
    read = list[torch.Tensor]()
    try:
        for turn, unit in enumerate(units):
            (place, info), *_ = layouts[unit].places_on(there).values()
            read.append(stream.acquire(unit)[place : place + info.nbytes].clone())
            if turn in broken:
                stream.abandon()
            else:
                stream.release()
        assert [bytes(some.cpu().numpy()) for some in read] == [contents[unit] for unit in units]
    finally:
        stream.close()


def test_a_large_unit_is_read_in_blocks(tmp_path: Path) -> None:
    path, data = _file(tmp_path, "big", 3 * ReadShape().block + 12345)
    layout = lay_out("unit", [_tensor(path, "t", 777, len(data) - 777)])
    stream = DiskStream([layout], 1, DirectReader())
    assert _content(layout, stream.acquire(0)) == data[777:]
    stream.release()
    stream.close()


def test_a_truncated_file_is_one_typed_error_and_the_stream_lives(tmp_path: Path) -> None:
    layouts, contents = _units(tmp_path)
    path = layouts[0].extents[0].file
    put_back = as_it_is(path)
    stream = DiskStream(layouts, 2, DirectReader())
    stream.acquire(0)  # or it may be on its way while the file changes, from offset 0
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(StreamError, match="ended early") as caught:
        for unit in (1, 2, 3, 4, 0):
            stream.release()
            stream.acquire(unit)
    assert caught.value.file == path and caught.value.offset > 0
    stream.abandon()
    put_back()  # the same inode: the descriptor sees it whole again
    for unit, content in enumerate(contents):
        assert _content(layouts[unit], stream.acquire(unit)) == content
        stream.release()
    stream.close()


def test_a_missing_file_names_itself(tmp_path: Path) -> None:
    layouts, _ = _units(tmp_path)
    layouts[0].extents[0].file.unlink()
    stream = DiskStream(layouts, 2, DirectReader())
    with pytest.raises(StreamError, match="weights"):
        stream.acquire(0)
    stream.close()


@pytest.mark.parametrize("failure", [OSError(5, "Input/output error"), MemoryError("no memory")])
def test_any_failure_of_a_worker_reaches_the_caller(failure: Exception) -> None:
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


def test_closing_wakes_whoever_waits() -> None:
    never = threading.Event()
    ring = Ring(
        [f"unit {i}" for i in range(1)],
        1,
        lambda unit: [lambda slot: never.wait(60) or 0],
        workers=1,
        name="test",
    )
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            ring.acquire(0)
        except ClosedError as error:
            raised.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    closer = threading.Thread(target=ring.close)
    closer.start()
    waiter.join(30)
    assert len(raised) == 1
    never.set()
    closer.join(30)
    assert not closer.is_alive()


def test_short_reads_and_unaligned_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, data = _file(tmp_path, "short", 10 * PAGE + 5)
    real = os.preadv

    def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return real(descriptor, [buffers[0][: 2 * PAGE]], offset)

    monkeypatch.setattr(os, "preadv", short)
    arena, reader = Arena(11 * PAGE), DirectReader()
    assert reader.read_into(path, 0, arena.buffer, len(data)) == len(data)
    assert bytes(arena.buffer[: len(data)]) == data
    reader.close()


def test_a_file_system_without_direct_reads_is_read_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = _file(tmp_path, "buffered", 4 * PAGE + 9)
    real = os.open

    def refusing(file: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(file, flags)

    monkeypatch.setattr(os, "open", refusing)
    arena, reader = Arena(5 * PAGE), DirectReader()
    reader.read_into(path, 0, arena.buffer, len(data))
    assert bytes(arena.buffer[: len(data)]) == data
    assert reader.buffered == {path}
    reader.close()


def test_direct_reads_that_open_but_fail_go_on_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = _file(tmp_path, "late", 4 * PAGE + 9)
    arena, reader = Arena(5 * PAGE), DirectReader()
    real = os.preadv

    def refusing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if path not in reader.buffered:
            raise OSError(22, "Invalid argument")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", refusing)
    assert reader.read_into(path, 0, arena.buffer, len(data)) == len(data)
    assert bytes(arena.buffer[: len(data)]) == data
    reader.close()


def test_an_interrupted_restart_hands_out_no_half_filled_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, and a second one while the ring waits for its workers to come to rest."""
    filled: list[int] = []
    gate = threading.Event()

    def job(slot: int) -> int:
        gate.wait(30)
        filled.append(slot)
        return 1

    ring = Ring([f"unit {i}" for i in range(3)], 1, lambda unit: [job] * 8, workers=1, name="test")

    def interrupted() -> None:
        raise KeyboardInterrupt

    while not any(filling.running for filling in list(ring._cycle.fillings.values())):
        pass
    monkeypatch.setattr(ring._pool, "_listen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ring.abandon()
    monkeypatch.undo()
    gate.set()
    ring.acquire(0)
    assert len(filled) >= 8, "unit 0 was handed out before its eight jobs were done"
    ring.release()
    ring.close()


def test_no_thread_is_asked_whether_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python up to 3.12, interrupted while it asks or joins, takes a living thread for dead ever after."""

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


def test_files_are_closed(tmp_path: Path) -> None:
    gc.collect()  # what earlier tests have left may hold files
    before = len(os.listdir("/proc/self/fd"))
    layouts, _ = _units(tmp_path)
    reader = DirectReader()
    stream = DiskStream(layouts, 2, reader)
    stream.acquire(0)
    stream.release()
    stream.close()
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before


def _checkpoint_like(folder: Path, header: int) -> tuple[UnitLayout, bytes]:
    """A unit as safetensors has it behind a header of some length, with a tensor of an odd size in it."""
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
    assert layout.put_on(arena.tensor, torch.device("cpu")) is arena.tensor


def test_a_whole_layer_is_one_copy(tmp_path: Path) -> None:
    """However its header is, as long as its tensors have the sizes that weights have."""
    path, _ = _file(tmp_path, "weights", 40_000)
    infos = [_tensor(path, f"t{index}", 1000 + index * 8192, 8192) for index in range(4)]
    (move,) = lay_out("unit", infos).moves_to(torch.device("cuda"))
    assert (move.target, move.length) == (0, 4 * 8192)
