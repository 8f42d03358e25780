"""Weight reader: changed or replaced files are detected, and only regular files are read."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from offspec.core.errors import StreamError
from offspec.core.files import FileStamp, open_regular
from offspec.stream.arena import PAGE, Arena
from offspec.stream.direct_reader import DirectReader

PAGES = 67


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    file.write_bytes(os.urandom(PAGES * PAGE))
    return file


def read(reader: DirectReader, file: Path, page: int = 0) -> bytes:
    arena = Arena(PAGE)
    reader.read_into(file, page * PAGE, arena.buffer, PAGE)
    found = bytes(arena.buffer)
    arena.close()
    return found


@pytest.mark.parametrize("page", [0, 42, PAGES - 1])
def test_single_overwritten_page_is_detected_by_any_read(weights: Path, page: int) -> None:
    reader = DirectReader()
    reader.open([weights])
    with weights.open("r+b") as file:
        file.seek(page * PAGE)
        file.write(bytes(PAGE))
    for other in (page, 0, PAGES - 1):
        with pytest.raises(StreamError, match="load the model again"):
            read(reader, weights, other)
    reader.close()


def test_file_replaced_between_header_and_weights(weights: Path) -> None:
    descriptor = open_regular(weights)
    stamps = {weights: FileStamp.of(descriptor)}
    os.close(descriptor)
    reader = DirectReader(stamps=stamps)
    assert read(reader, weights) == weights.read_bytes()[:PAGE]
    reader.close()
    other = weights.with_name("other")
    other.write_bytes(bytes(PAGES * PAGE))
    status = weights.stat()
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))  # same size and time
    os.replace(other, weights)
    reader = DirectReader(stamps=stamps)
    with pytest.raises(StreamError, match="load the model again"):
        read(reader, weights)
    reader.close()


def test_buffered_read_of_an_unchanged_file(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, reader = weights.read_bytes(), DirectReader()
    reader.open([weights])
    reader._files[weights] = replace(reader._files[weights], direct=True)
    other = weights.with_name("other")
    other.write_bytes(bytes(PAGES * PAGE))
    os.replace(other, weights)
    real, calls = os.preadv, iter(range(1000))

    def refuses_once(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if next(calls) == 0:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuses_once)
    assert read(reader, weights, 5) == whole[5 * PAGE : 6 * PAGE]
    assert reader.buffered == {weights}
    reader.close()


def test_short_direct_read_continues_from_a_whole_page(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, arena, offsets = DirectReader(), Arena(3 * PAGE), list[int]()
    reader.open([weights])
    reader._files[weights] = replace(reader._files[weights], direct=True)
    real = os.preadv

    def ends_early(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        return min(real(descriptor, buffers, offset), PAGE + 100)

    monkeypatch.setattr(os, "preadv", ends_early)
    reader.read_into(weights, 0, arena.buffer, 3 * PAGE)
    assert bytes(arena.buffer) == weights.read_bytes()[: 3 * PAGE]
    assert offsets == [0, PAGE, 2 * PAGE]
    arena.close()
    reader.close()


def test_pipes_and_devices_are_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = DirectReader()
    for special in (pipe, Path("/dev/zero")):
        with pytest.raises(StreamError, match="regular file"):
            read(reader, special)
    reader.close()
