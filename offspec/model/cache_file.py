"""The cache of a conversation in a file, with the token ids that it is of.

A safetensors file: the ids, the states that can be gone back to, of each layer the rows of all that it keeps,
in the form that it keeps them in, and last checksums of all before. So what is read is what was written, to
the bit, whatever kind of cache it was.

Letters: n positions.
"""

import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from offspec.checkpoint.checksum import forget_pages
from offspec.checkpoint.safetensors import read_header
from offspec.checkpoint.tensors import TensorInfo, dtype_name, torch_dtype
from offspec.checkpoint.write import SafetensorsWriter
from offspec.core.errors import CheckpointError
from offspec.core.files import reading
from offspec.model.cache import TreeCache
from offspec.model.recurrence.snapshots import Place, Snapshot
from offspec.model.recurrence.state import Committed

VERSION = "2"  # of the names and their order; files of another are not read
_READERS = 2  # threads
_IDS, _ROWS, _STATE, _SUMS = "ids", "rows", "state", "crc32"


@dataclass(frozen=True, slots=True)
class CacheFile:
    """What the header of such a file says.

    Args:
        path: Of the file.
        ids: [n] int32.
        lengths: Where its states are of, ascending; () where the model has none.
        nbytes: Of the whole file.
    """

    path: Path
    ids: NDArray[np.int32]
    lengths: tuple[int, ...]
    nbytes: int

    def reusable(self, shared: int) -> int:
        """Positions that are left of it for a text which shares the first `shared` ids."""
        if not self.lengths:
            return shared
        return max((length for length in self.lengths if length <= shared), default=0)


def size_of(cache: TreeCache) -> int:
    """Bytes that its tensors take in a file."""
    return sum(tensor.nbytes for tensor in _tensors(cache).values())


def write_cache(
    path: Path,
    cache: TreeCache,
    ids: Sequence[int] | NDArray[np.int32],
    key: str,
    look: Callable[[], None] = lambda: None,
) -> None:
    """Write what is committed, whole or not at all, to a file of the user's own.

    Args:
        path: Of the file.
        cache: With n committed positions.
        ids: [n].
        key: What tells caches that can stand for each other from others.
        look: Called before each part; what it raises ends the writing.

    Raises:
        DiskFullError: There is no room.
        OSError: It cannot be written.
    """
    tensors = {_IDS: torch.tensor(np.asarray(ids, np.int32)), **_tensors(cache)}
    entries = [(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()]
    count = 1 + sum(len(_parts(name, tensor)) for name, tensor in tensors.items())
    out = SafetensorsWriter(
        path, [*entries, (_SUMS, "U32", (count,))], metadata={"version": VERSION, "key": key}, mode=0o600
    )
    sums = list[int]()
    out.on_bytes = lambda buffer: sums.append(zlib.crc32(buffer))
    cache.settle()
    with out:
        for name, tensor in tensors.items():
            for part in _parts(name, tensor):
                look()
                out.write(name, part)
        out.write(_SUMS, np.array(sums, "<u4"))


def _parts(name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """What is written, read and summed up at once: the rows of one head; whole what has no heads."""
    return [*tensor] if name.startswith(_ROWS) else [tensor]


def look_at(path: Path, key: str) -> CacheFile:
    """What a file holds, by its header and ids alone. Raises CheckpointError where it is no such file."""
    infos, metadata = read_header(path)
    if (metadata.get("version"), metadata.get("key")) != (VERSION, key) or _SUMS not in infos:
        raise CheckpointError(f"{path} is of another model, or of another version of offspec")
    found = infos.get(_IDS)
    if found is None or found.dtype != "I32" or len(found.shape) != 1:
        raise CheckpointError(f"{path} has no token ids")
    with reading(path), path.open("rb") as file:
        file.seek(found.offset)
        ids = np.frombuffer(file.read(found.nbytes), np.int32)
    with _unforeseen(path):
        lengths = {int(name.split()[1]) for name in infos if name.startswith(_STATE)}
    end = max(info.offset + info.nbytes for info in infos.values())
    return CacheFile(path, ids, tuple(sorted(lengths)), end)


def read_cache(
    found: CacheFile,
    cache: TreeCache,
    devices: Sequence[torch.device],
    dtype: torch.dtype,
    look: Callable[[], None] = lambda: None,
) -> None:
    """Have a cache hold what is in a file.

    Args:
        found: Of a cache of the same model, of the same kind.
        cache: What it holds is dropped, and stays so after an error.
        devices: Of each of its layers, where it is computed.
        dtype: Of keys and values, in whatever form they are kept.
        look: Called before each part; what it raises ends the reading.

    Raises:
        CheckpointError: The file is damaged, or of another kind of cache.
    """
    path, length = found.path, len(found.ids)
    infos, _ = read_header(path)
    cache.drop()
    states: dict[int, dict[Place, dict[str, torch.Tensor]]] = {}
    with _unforeseen(path):
        stores = _stores(cache, infos, length, devices, dtype)
        start = min(info.offset for info in infos.values())
    parts = [torch.empty(start, dtype=torch.uint8)]
    expected, end = torch.empty(0, dtype=torch.uint8), start
    for name, info in sorted(infos.items(), key=lambda item: item[1].offset):
        if info.offset != end:
            raise CheckpointError(f"{path} has a gap before {name}")
        end += info.nbytes
        if name in stores:
            parts += [head[:length] for head in stores[name][0]]
            continue
        tensor = torch.empty(info.shape, dtype=torch_dtype(info.dtype))
        if name == _SUMS:
            expected = tensor
            break
        parts.append(tensor)
        if name.startswith(_STATE):
            with _unforeseen(path):
                _, at, layer, place, part = name.split()
                states.setdefault(int(at), {}).setdefault((int(layer), int(place)), {})[part] = tensor
    found_sums = _read_parts(path, [*parts, expected], look)[:-1]
    if np.array(found_sums, "<u4").tobytes() != expected.numpy().tobytes():
        raise CheckpointError(f"{path} is damaged: its checksums are not those it was written with")
    with _unforeseen(path):
        kept = [
            Snapshot(at, {place: Committed(**parts) for place, parts in of.items()})
            for at, of in sorted(states.items())
        ]
    cache.resume(length, kept)


@contextmanager
def _unforeseen(path: Path) -> Iterator[None]:
    """Turn what names and shapes of nobody's making cause inside the block into a CheckpointError."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} does not fit this model: {error}") from error


def _read_parts(path: Path, parts: Sequence[torch.Tensor], look: Callable[[], None]) -> list[int]:
    """Fill tensors with a file's bytes, one behind the other; the checksum of each.

    Several at a time: memory that is touched for the first time takes as long as the disk. Raises
    CheckpointError where there are too few bytes.
    """
    sums, offset = list[int](), 0
    under_way = deque[tuple[torch.Tensor, torch.Tensor, Future[int]]]()
    with reading(path), path.open("rb", buffering=0) as file, ThreadPoolExecutor(_READERS) as pool:
        try:
            for part in parts:
                look()
                direct = part.device.type == "cpu" and part.is_contiguous()
                to = part if direct else torch.empty(part.shape, dtype=part.dtype)
                under_way.append((part, to, pool.submit(_fill, file.fileno(), offset, to)))
                offset += part.nbytes
                if len(under_way) > 2 * _READERS:
                    sums.append(_taken(*under_way.popleft()))
            sums += [_taken(*under_way.popleft()) for _ in range(len(under_way))]
        except EOFError:
            raise CheckpointError(f"{path} ends too early") from None
        finally:
            pool.shutdown(cancel_futures=True)
    return sums


def _taken(part: torch.Tensor, to: torch.Tensor, filled: Future[int]) -> int:
    """The checksum of a part, when it is where it belongs."""
    checksum = filled.result()
    if to is not part:
        part.copy_(to)
    return checksum


def _fill(descriptor: int, offset: int, to: torch.Tensor) -> int:
    """Fill a tensor from a file, past the page cache as far as can be; its checksum. Raises EOFError."""
    buffer = memoryview(to.view(-1).view(torch.uint8).numpy().data)
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if not count:
            raise EOFError
        done += count
    forget_pages(descriptor, offset, done)
    return zlib.crc32(buffer)


def _tensors(cache: TreeCache) -> dict[str, torch.Tensor]:
    """All that is committed, by name: states in the order of their lengths, then rows [heads, n, numbers]."""
    found = dict[str, torch.Tensor]()
    for snapshot in cache.states():
        for (layer, place), committed in snapshot.states.items():
            for part in ("tail", "state"):
                if (tensor := getattr(committed, part)) is not None:
                    found[f"{_STATE} {snapshot.length} {layer} {place} {part}"] = tensor
    for layer, row in enumerate(cache.rows):
        for name, store in row.named_stores.items():
            found[f"{_ROWS} {layer} {name}"] = store[0, :, : cache.length]
    return found


def _stores(
    cache: TreeCache,
    infos: Mapping[str, TensorInfo],
    length: int,
    devices: Sequence[torch.device],
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """Where the rows of a file go, by their name there. Raises ValueError where a layer keeps others."""
    layers = dict[int, dict[str, torch.Tensor]]()
    for info in infos.values():
        if info.name.startswith(_ROWS):
            _, layer, name = info.name.split()
            heads, rows, numbers = info.shape
            if rows != length:
                raise ValueError(f"{info.name} has {rows} rows")
            kind, device = torch_dtype(info.dtype), devices[int(layer)]
            like = torch.empty(1, heads, 0, numbers, dtype=kind, device=device)
            layers.setdefault(int(layer), {})[name] = like
    found = dict[str, torch.Tensor]()
    for index, likes in layers.items():
        stores = cache.rows[index].hold(likes, length, dtype)
        if stores.keys() != likes.keys():
            raise ValueError(f"layer {index} keeps {', '.join(stores)}")
        for name, store in stores.items():
            like = likes[name]
            if (store.shape[1], store.shape[3], store.dtype) != (like.shape[1], like.shape[3], like.dtype):
                raise ValueError(f"layer {index} keeps other {name}")
            found[f"{_ROWS} {index} {name}"] = store
    return found
