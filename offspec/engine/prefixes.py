"""Conversations whose keys and values were given up for another's, on disk, and found again by their ids.

An engine has one cache. A prompt that goes on from what is in it keeps that; one of another conversation puts
it out, and the first would have to be computed again when it is taken up. So what is put out is written to
files, of at most so many bytes together, of which those that were not used for longest go first.
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
from offspec.core.files import private_folder, require_space, writing
from offspec.model.arithmetic import arithmetic
from offspec.model.cache import TreeCache
from offspec.model.cache_file import CacheFile, look_at, read_cache, size_of, write_cache
from offspec.model.loaded import LoadedModel
from offspec.plan.hardware_profile import machine_fingerprint
from offspec.plan.load import Assembly
from offspec_planners.units import format_bytes

LEAST = 256  # positions that are worth a file, and reading one
_ENDING, _PARTIAL = ".safetensors", ".partial"
_TELLING = 32 << 20  # bytes of a file whose seconds are those of its bytes
_LONG = 64  # rows of a prompt from which a pass tells what they take
_ABANDONED_S = 3600.0  # a file that was begun longer ago than this is not being written


def common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """How many ids two texts begin with alike."""
    size = min(len(one), len(other))
    differ = one[:size] != other[:size]
    return int(differ.argmax()) if differ.any() else size


class PrefillRate:
    """Seconds that rows of a prompt take beyond those of a pass, which comes in any case."""

    def __init__(self) -> None:
        self._pass = math.inf  # seconds of the shortest pass with few rows
        self._rows, self._seconds = 0, 0.0  # of the latest with many

    def note(self, rows: int, seconds: float) -> None:
        """A prompt of so many rows, or a tree alone, took so long, all its passes together."""
        if rows < _LONG:
            self._pass = min(self._pass, seconds)
        else:
            self._rows, self._seconds = rows, seconds

    def seconds(self, rows: int) -> float | None:
        """What so many rows more would take; None where no long prompt was seen."""
        if not self._rows:
            return None
        alone = self._pass if math.isfinite(self._pass) else 0.0
        return max(self._seconds - alone, 0.0) / self._rows * rows


class Prefixes:
    """Files of conversations with one model, and what decides about them.

    Args:
        target: Whose caches they are.
        key: What tells keys and values that can stand for each other from others.
        limit: Bytes of all files in the folder, other models' included.
        notify: Takes a Notice where a file is of no use, and where none can be written.
    """

    def __init__(self, target: LoadedModel, key: str, limit: int, notify: Callable[[Event], None]) -> None:
        self.folder = cache_root() / PREFIXES
        self.prefill = PrefillRate()
        self._target, self._key, self._limit, self._notify = target, key, limit, notify
        self._known: dict[Path, CacheFile] = {}
        self._disk_rate: float | None = None  # bytes a second, of the latest large file
        self._told = False  # that the limit is too small

    def change(
        self, cache: TreeCache, held: Sequence[int], prompt: Sequence[int], look: Callable[[], None]
    ) -> Sequence[int]:
        """Have the cache hold as much as can be had of a prompt; the ids that it holds then.

        What it held is written to a file, where the prompt has no use for many of its positions.

        Args:
            cache: Of the target.
            held: The ids of all its positions.
            prompt: The ids that are to be committed. The last is not looked for: a pass begins with it.
            look: Called between parts of files; it may raise. The cache is empty then where a file was read.
        """
        mine, wanted = np.asarray(held, np.int32), np.asarray(prompt[:-1], np.int32)
        shared = common(mine, wanted)
        found = self._best(cache, wanted, cache.reusable(shared))
        if len(mine) - shared >= LEAST:
            self.keep(cache, held, found, look)
        if found is not None and self._read(cache, found, look):
            return [*map(int, found.ids)]
        return held[: cache.length]  # none where a damaged file was half read

    def keep(
        self,
        cache: TreeCache,
        held: Sequence[int],
        spare: CacheFile | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """Write what the cache holds, unless almost all of it is in a file.

        Args:
            cache: Of the target.
            held: The ids of all its positions.
            spare: A file that is not to be removed for it.
            look: As for `change`.
        """
        ids = np.asarray(held, np.int32)
        if len(ids) < LEAST:
            return
        files = self._files()
        for file in files:
            if len(ids) - file.reusable(common(file.ids, ids)) < LEAST:
                _touch(file.path)
                return
        outdone = [
            file.path for file in files if file is not spare and len(file.ids) - common(file.ids, ids) < LEAST
        ]
        digest = hashlib.sha256(ids.tobytes()).hexdigest()[:16]
        path = self.folder / f"{self._key}-{digest}{_ENDING}"
        size, began = size_of(cache) + ids.nbytes, time.perf_counter()
        try:
            with writing(self.folder, ELSEWHERE):
                private_folder(self.folder)
                if not self._make_room(size, outdone, spare):
                    return
                require_space(self.folder, size, "keeping this conversation")
                write_cache(path, cache, ids, self._key, look)
        except OffspecError as error:
            self._notify(Notice(f"keys and values of a conversation are not kept: {error}"))
            return
        self._timed(size, time.perf_counter() - began)
        for old in outdone:
            _remove(old)

    def _best(self, cache: TreeCache, wanted: NDArray[np.int32], live: int) -> CacheFile | None:
        """The file that has most of a prompt, where reading it is quicker than computing what it has more.

        live: positions that the cache has of the prompt.
        """
        files = [file for file in self._files() if all(len(file.ids) <= row.capacity for row in cache.rows)]
        has = {file.path: file.reusable(common(file.ids, wanted)) for file in files}
        best = max(files, key=lambda file: (has[file.path], -file.nbytes), default=None)
        if best is None or has[best.path] - live < LEAST:
            return None
        computing = self.prefill.seconds(has[best.path] - live)
        if self._disk_rate is not None and computing is not None:
            return best if best.nbytes / self._disk_rate < computing else None
        return best

    def _read(self, cache: TreeCache, found: CacheFile, look: Callable[[], None]) -> bool:
        """Whether the cache holds what is in a file now; else that is gone, and the cache perhaps empty."""
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
        """Learn the rate of the disk by a file that is large enough to tell it."""
        if nbytes >= _TELLING:
            self._disk_rate = nbytes / max(seconds, 1e-9)

    def _files(self) -> list[CacheFile]:
        """All that are of this model. Other processes write and remove files too."""
        there = dict[Path, CacheFile]()
        for path in self._paths():
            if not path.name.startswith(self._key):
                continue
            try:
                there[path] = self._known.get(path) or look_at(path, self._key)
            except CheckpointError as error:
                self._discard(path, error)
        self._known = there
        return [*there.values()]

    def _paths(self) -> list[Path]:
        """Files of all models, the one that was not used for longest first; what is abandoned is removed."""
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
        """Remove files until so many bytes more are within the limit; whether that can be.

        outdone: those that go first.
        """
        if size > self._limit:
            if not self._told:
                least = format_bytes(size)
                self._notify(Notice(f"a conversation is not kept: `cache_size` would have to be {least}"))
            self._told = True
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
        """Remove a file that is of no use, and say so, unless another process has removed it."""
        self._known.pop(path, None)
        if path.exists():
            _remove(path)
            why = str(error).removesuffix("; download it again")
            self._notify(Notice(f"a conversation that was kept is computed again: {why}"))


def open_prefixes(
    config: EngineConfig, assembly: Assembly, notify: Callable[[Event], None]
) -> Prefixes | None:
    """Those of an engine; None where its configuration wants none."""
    if not config.cache_size:
        return None
    target = assembly.target
    decides = (
        assembly.target_print,
        str(target.dtype),
        target.int8_cache,
        target.long_factors,
        [str(device.type) for device in target.row_devices],  # each kind rounds in its own way
        machine_fingerprint(str(target.device)),
        arithmetic(),
    )
    key = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]
    return Prefixes(target, key, config.cache_size, notify)


def _touch(path: Path) -> None:
    with suppress(OSError):
        os.utime(path)


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
