"""KV cache of a conversation in a file, with its token ids.

A safetensors file holds the ids, the recurrent state snapshots, the rows of each layer's stores in their
storage format, and last the checksums of all these. Reading restores every kind of cache bit for bit.

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
from offspec.checkpoint.safetensors_writer import SafetensorsWriter
from offspec.checkpoint.tensors import TensorInfo, dtype_name, torch_dtype
from offspec.core.errors import CheckpointError
from offspec.core.files import as_read_error
from offspec.model.cache import TreeCache
from offspec.model.recurrence.snapshots import Place, Snapshot
from offspec.model.recurrence.state import RecurrentState

VERSION = "2"  # of the tensor names and their order; files of other versions are rejected
_READERS = 2  # threads
_IDS, _ROWS, _STATE, _SUMS = "ids", "rows", "state", "crc32"


@dataclass(frozen=True, slots=True)
class CacheFile:
    """Header and token ids of a cache file.

    Args:
        path: Path of the file.
        ids: [n] int32, token ids of the cached positions.
        lengths: Positions of the recurrent state snapshots, ascending; () if the model has no states.
        nbytes: Size of the file in bytes.
    """

    path: Path
    ids: NDArray[np.int32]
    lengths: tuple[int, ...]
    nbytes: int

    def reusable(self, shared: int) -> int:
        """Return how many positions are usable for a text that shares the first `shared` ids."""
        if not self.lengths:
            return shared
        return max((length for length in self.lengths if length <= shared), default=0)


def cache_file_bytes(cache: TreeCache) -> int:
    """Return the bytes of a cache's tensors in a file."""
    return sum(tensor.nbytes for tensor in _tensors(cache).values())


def write_cache(
    path: Path,
    cache: TreeCache,
    ids: Sequence[int] | NDArray[np.int32],
    key: str,
    check_cancelled: Callable[[], None] = lambda: None,
) -> None:
    """Write the committed positions of a cache to a file atomically, readable by the user only.

    Args:
        path: Path of the file.
        cache: Cache with n committed positions.
        ids: [n] token ids of these positions.
        key: Key that only interchangeable caches share.
        check_cancelled: Called before each part; an error from it ends the write.

    Raises:
        DiskFullError: The disk is full.
        OSError: The file cannot be written.
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
                check_cancelled()
                out.write(name, part)
        out.write(_SUMS, np.array(sums, "<u4"))


def _parts(name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Split a tensor into the parts that are written, read and checksummed at once: a head each, for rows."""
    return [*tensor] if name.startswith(_ROWS) else [tensor]


def read_cache_header(path: Path, key: str) -> CacheFile:
    """Read a cache file's header and token ids. Raises CheckpointError if it is not a cache for `key`."""
    infos, metadata = read_header(path)
    if (metadata.get("version"), metadata.get("key")) != (VERSION, key) or _SUMS not in infos:
        raise CheckpointError(f"{path} was written by another model or another version of offspec")
    found = infos.get(_IDS)
    if found is None or found.dtype != "I32" or len(found.shape) != 1:
        raise CheckpointError(f"{path} has no token ids")
    with as_read_error(path), path.open("rb") as file:
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
    check_cancelled: Callable[[], None] = lambda: None,
) -> None:
    """Replace the contents of a cache with a file's.

    Args:
        found: File of the same kind of cache of the same model.
        cache: Cache to fill. Its contents are dropped, even if reading fails.
        devices: Compute device of each layer.
        dtype: Compute dtype of keys and values, whatever their storage format.
        check_cancelled: Called before each part; an error from it ends the read.

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
    found_sums = _read_parts(path, [*parts, expected], check_cancelled)[:-1]
    if np.array(found_sums, "<u4").tobytes() != expected.numpy().tobytes():
        raise CheckpointError(f"{path} is damaged: its checksums do not match")
    with _unforeseen(path):
        kept = [
            Snapshot(at, {place: RecurrentState(**parts) for place, parts in of.items()})
            for at, of in sorted(states.items())
        ]
    cache.resume(length, kept)


@contextmanager
def _unforeseen(path: Path) -> Iterator[None]:
    """Raise errors from unexpected names and shapes inside the block as CheckpointError."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} does not fit this model: {error}") from error


def _read_parts(path: Path, parts: Sequence[torch.Tensor], look: Callable[[], None]) -> list[int]:
    """Fill consecutive tensors with a file's bytes; return the checksum of each.

    Several are read at a time, because the first touch of memory takes as long as the disk. Raises
    CheckpointError if the file is too short.
    """
    sums, offset = list[int](), 0
    under_way = deque[tuple[torch.Tensor, torch.Tensor, Future[int]]]()
    with as_read_error(path), path.open("rb", buffering=0) as file, ThreadPoolExecutor(_READERS) as pool:
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
            raise CheckpointError(f"{path} is truncated") from None
        finally:
            pool.shutdown(cancel_futures=True)
    return sums


def _taken(part: torch.Tensor, to: torch.Tensor, filled: Future[int]) -> int:
    """Wait for a part, copy it to its tensor if needed, and return its checksum."""
    checksum = filled.result()
    if to is not part:
        part.copy_(to)
    return checksum


def _fill(descriptor: int, offset: int, to: torch.Tensor) -> int:
    """Fill a tensor from a file, drop the file's cached pages, and return the checksum. Raises EOFError."""
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
    """Return all committed tensors by name: states by ascending length, then rows [heads, n, numbers]."""
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
    """Return the stores for a file's rows by tensor name. Raises ValueError if a layer's stores differ."""
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
        stores = cache.rows[index].allocate_like(likes, length, dtype)
        if stores.keys() != likes.keys():
            raise ValueError(f"layer {index} stores {', '.join(stores)}")
        for name, store in stores.items():
            like = likes[name]
            if (store.shape[1], store.shape[3], store.dtype) != (like.shape[1], like.shape[3], like.dtype):
                raise ValueError(f"layer {index} stores {name} of another shape or dtype")
            found[f"{_ROWS} {index} {name}"] = store
    return found
