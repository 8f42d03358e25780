"""KV caches of evicted conversations on disk, found again by their token ids.

A prompt of another conversation replaces the content of an engine's KV cache, which would have to be computed
again when the first conversation continues. So evicted content is written to files, up to a total size; the
least recently used files are deleted first.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from offspec.core.cache_dir import ELSEWHERE, PREFIXES, cache_root
from offspec.core.config import EngineConfig
from offspec.core.errors import CheckpointError, OffspecError
from offspec.core.events import Event, Notice
from offspec.core.files import as_write_error, make_private_folder, require_space
from offspec.model.cache import TreeCache
from offspec.model.cache_file import CacheFile, cache_file_bytes, read_cache, read_cache_header, write_cache
from offspec.model.loaded import LoadedModel
from offspec.model.numerics_fingerprint import numerics_fingerprint
from offspec.plan.hardware_profile import machine_fingerprint
from offspec.plan.load import Assembly
from offspec_planners.units import format_bytes

LEAST = 256  # minimum positions worth writing or reading a file
_ENDING, _PARTIAL = ".safetensors", ".partial"
_TELLING = 32 << 20  # minimum bytes of a file for a measurement of the disk's rate
_LONG = 64  # minimum prompt rows of a pass for a measurement of prefill
_ABANDONED_S = 3600.0  # a partial file older than this is no longer being written


def common_prefix_length(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Return the length of the common prefix of two sequences of token ids."""
    size = min(len(one), len(other))
    differ = one[:size] != other[:size]
    return int(differ.argmax()) if differ.any() else size


class PrefillRate:
    """Estimates the marginal time of prompt tokens, on top of a regular pass."""

    def __init__(self) -> None:
        self._pass = math.inf  # seconds of the fastest pass with few rows
        self._rows, self._seconds = 0, 0.0  # latest prefill with many rows

    def note(self, rows: int, seconds: float) -> None:
        """Record the total time of all passes of a prompt with `rows` rows, or of a pass with a tree only."""
        if rows < _LONG:
            self._pass = min(self._pass, seconds)
        else:
            self._rows, self._seconds = rows, seconds

    def seconds(self, rows: int) -> float | None:
        """Return the estimated time of `rows` additional rows; None before a long prompt was measured."""
        if not self._rows:
            return None
        alone = self._pass if math.isfinite(self._pass) else 0.0
        return max(self._seconds - alone, 0.0) / self._rows * rows


class PrefixCache:
    """Disk cache of KV caches of one model.

    Args:
        target: The model.
        key: Fingerprint of everything that affects the bits of keys and values.
        limit: Maximum bytes of all files in the folder, including those of other models.
        notify: Receives a Notice if a file is unusable or cannot be written.
    """

    def __init__(self, target: LoadedModel, key: str, limit: int, notify: Callable[[Event], None]) -> None:
        self.folder = cache_root() / PREFIXES
        self.prefill = PrefillRate()
        self._target, self._key, self._limit, self._notify = target, key, limit, notify
        self._known: dict[Path, CacheFile] = {}
        self._disk_rate: float | None = None  # bytes per second of the latest large file
        self._limit_reported = False  # whether a Notice about a too small limit was sent

    def swap_in(
        self, cache: TreeCache, held: Sequence[int], prompt: Sequence[int], look: Callable[[], None]
    ) -> Sequence[int]:
        """Load the longest known prefix of a prompt into the cache; return the ids of the cache afterwards.

        The previous content is written to a file if the prompt shares too little with it.

        Args:
            cache: The target's cache.
            held: Token ids of all positions of the cache.
            prompt: Token ids of the prompt. The last one is always computed, so it is not looked up.
            look: Called between parts of files. If it raises while a file is read, the cache is empty.
        """
        mine, wanted = np.asarray(held, np.int32), np.asarray(prompt[:-1], np.int32)
        shared = common_prefix_length(mine, wanted)
        found = self._best(cache, wanted, cache.reusable(shared))
        if len(mine) - shared >= LEAST:
            self.save(cache, held, found, look)
        if found is not None and self._read(cache, found, look):
            return [*map(int, found.ids)]
        return held[: cache.length]  # empty if reading a damaged file failed halfway

    def save(
        self,
        cache: TreeCache,
        held: Sequence[int],
        spare: CacheFile | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """Write the cache to a file, unless a file already contains almost all of it.

        Args:
            cache: The target's cache.
            held: Token ids of all positions of the cache.
            spare: A file that must not be deleted to make room.
            look: As for `swap_in`.
        """
        ids = np.asarray(held, np.int32)
        if len(ids) < LEAST:
            return
        files = self._files()
        for file in files:
            if len(ids) - file.reusable(common_prefix_length(file.ids, ids)) < LEAST:
                _touch(file.path)
                return
        outdone = [
            file.path
            for file in files
            if file is not spare and len(file.ids) - common_prefix_length(file.ids, ids) < LEAST
        ]
        digest = hashlib.sha256(ids.tobytes()).hexdigest()[:16]
        path = self.folder / f"{self._key}-{digest}{_ENDING}"
        size, began = cache_file_bytes(cache) + ids.nbytes, time.perf_counter()
        try:
            with as_write_error(self.folder, ELSEWHERE):
                make_private_folder(self.folder)
                if not self._make_room(size, outdone, spare):
                    return
                require_space(self.folder, size, "saving this conversation's KV cache")
                write_cache(path, cache, ids, self._key, look)
        except OffspecError as error:
            self._notify(Notice(f"the KV cache of a conversation was not saved: {error}"))
            return
        self._timed(size, time.perf_counter() - began)
        for old in outdone:
            _remove(old)

    def _best(self, cache: TreeCache, wanted: NDArray[np.int32], live: int) -> CacheFile | None:
        """Return the file with the longest prefix of a prompt if reading it is faster than computing it.

        Args:
            cache: The target's cache.
            wanted: Token ids of the prompt.
            live: Positions of the prompt that are already in the cache.
        """
        files = [file for file in self._files() if all(len(file.ids) <= row.capacity for row in cache.rows)]
        has = {file.path: file.reusable(common_prefix_length(file.ids, wanted)) for file in files}
        best = max(files, key=lambda file: (has[file.path], -file.nbytes), default=None)
        if best is None or has[best.path] - live < LEAST:
            return None
        computing = self.prefill.seconds(has[best.path] - live)
        if self._disk_rate is not None and computing is not None:
            return best if best.nbytes / self._disk_rate < computing else None
        return best

    def _read(self, cache: TreeCache, found: CacheFile, look: Callable[[], None]) -> bool:
        """Read a file into the cache; return False if the file is damaged.

        A damaged file is deleted; the cache may be empty then.
        """
        target, began = self._target, time.perf_counter()
        try:
            read_cache(found, cache, target.row_devices, target.dtype, look)
        except CheckpointError as error:
            self._discard(found.path, error)
            return False
        self._timed(found.nbytes, time.perf_counter() - began)
        _touch(found.path)
        return True

    def _timed(self, nbytes: int, seconds: float) -> None:
        """Record the disk's rate if the file is large enough for a measurement."""
        if nbytes >= _TELLING:
            self._disk_rate = nbytes / max(seconds, 1e-9)

    def _files(self) -> list[CacheFile]:
        """Return this model's files; other processes may add and delete files at any time."""
        there = dict[Path, CacheFile]()
        for path in self._paths():
            if not path.name.startswith(self._key):
                continue
            try:
                there[path] = self._known.get(path) or read_cache_header(path, self._key)
            except CheckpointError as error:
                self._discard(path, error)
        self._known = there
        return [*there.values()]

    def _paths(self) -> list[Path]:
        """Return the files of all models, least recently used first; delete abandoned partial files."""
        ages = dict[Path, float]()
        with suppress(OSError):
            for entry in os.scandir(self.folder):
                with suppress(OSError):
                    ages[Path(entry.path)] = entry.stat().st_mtime
        for path, used in ages.items():
            if path.suffix == _PARTIAL and time.time() - used > _ABANDONED_S:
                _remove(path)
        return sorted((path for path in ages if path.suffix == _ENDING), key=lambda path: ages[path])

    def _make_room(self, size: int, outdone: Sequence[Path], spare: CacheFile | None) -> bool:
        """Delete files until `size` more bytes are within the limit; return False if that is impossible.

        Args:
            size: Bytes needed.
            outdone: Files to delete first.
            spare: A file that must not be deleted.
        """
        if size > self._limit:
            if not self._limit_reported:
                least = format_bytes(size)
                self._notify(
                    Notice(f"the KV cache of a conversation was not saved: it needs `cache_size` {least}")
                )
            self._limit_reported = True
            return False
        sizes = dict[Path, int]()
        for path in sorted(self._paths(), key=lambda path: path not in outdone):
            with suppress(OSError):
                sizes[path] = path.stat().st_size
        left = sizes.pop(spare.path, 0) if spare is not None else 0
        if left + size > self._limit:
            return False
        total = left + size + sum(sizes.values())
        for path, nbytes in sizes.items():
            if total > self._limit:
                _remove(path)
                total -= nbytes
        return True

    def _discard(self, path: Path, error: CheckpointError) -> None:
        """Delete an unusable file and send a Notice, unless another process has deleted it."""
        self._known.pop(path, None)
        if path.exists():
            _remove(path)
            why = str(error).removesuffix("; download it again")
            self._notify(Notice(f"a saved conversation is computed again: {why}"))


def open_prefix_cache(
    config: EngineConfig, assembly: Assembly, notify: Callable[[Event], None]
) -> PrefixCache | None:
    """Return an engine's prefix cache; None if `cache_size` is 0."""
    if not config.cache_size:
        return None
    target = assembly.target
    decides = (
        assembly.target_fingerprint,
        str(target.dtype),
        target.int8_cache,
        target.long_factors,
        [str(device.type) for device in target.row_devices],  # each type rounds differently
        machine_fingerprint(str(target.device)),
        numerics_fingerprint(),
    )
    key = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]
    return PrefixCache(target, key, config.cache_size, notify)


def _touch(path: Path) -> None:
    with suppress(OSError):
        os.utime(path)


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
