"""The disks that models come from: whether they are read past the page cache, how fast, and their room."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from offspec.core import files
from offspec.core.cache_dir import ELSEWHERE, cache_root
from offspec.core.errors import OffspecError, StreamError
from offspec.engine.doctor.finding import Asked, Figure, Finding
from offspec.plan.hardware_profile import in_folder, large_files, written_file
from offspec_planners.hardware_rates import Rate
from offspec_planners.units import format_bytes, format_rate

_ROOM = 20_000_000_000  # bytes; what an 8B model takes
_SLOW = 500_000_000  # bytes per second
_SECONDS = 0.1  # of each of several readings
_MOUNTS = Path("/proc/self/mountinfo")
_LOCAL = "keep models on a local disk with ext4 or XFS: set HF_HOME and OFFSPEC_CACHE to folders on it"
_FASTER = (
    "if there is a faster disk, keep models on it: set HF_HOME and OFFSPEC_CACHE to folders on it. An NVMe "
    "disk gives 3 GB/s and more"
)


def check(asked: Asked) -> Iterator[Finding]:
    """A finding for each disk: of our cache, of the hub's, and of the folders that were named."""
    from huggingface_hub import constants

    named = [("cache", cache_root()), ("hub cache", Path(constants.HF_HUB_CACHE))]
    named += [(str(folder), folder) for folder in asked.folders]
    disks = dict[int, list[tuple[str, Path]]]()
    for name, folder in named:
        place = _existing(folder)
        disks.setdefault(place.stat().st_dev, []).append((name, place))
    for found in disks.values():
        names = list(dict.fromkeys(name for name, _ in found))
        yield _disk(f"disk: {', '.join(names)}", [place for _, place in found])


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that there is already."""
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def _disk(part: str, places: Sequence[Path]) -> Finding:
    """One disk, measured on large files in these folders, or on one that is written to the first of them."""
    room, kind = shutil.disk_usage(places[0]).free, file_system(places[0])
    figures: dict[str, Figure] = {"folder": str(places[0]), "free": room, "file_system": kind}
    if not os.access(places[0], os.W_OK):
        found = f"{places[0]} cannot be written to"
        return Finding(part, "failed", found, f"change its permissions, or {ELSEWHERE}", figures)
    try:
        with _readable(places) as found_files:
            direct, rate = _measured(found_files)
    except _ReadError as error:
        return Finding(part, "failed", str(error), "look at dmesg: the disk may be damaged", figures)
    except OffspecError as error:
        return Finding(part, "failed", str(error), figures=figures)
    figures |= {"direct": direct, "bytes_per_s": rate.value, "slowest": rate.low, "fastest": rate.high}
    read = f"{kind}, read at {format_rate(rate.value)}"
    left = f"{format_bytes(room)} free"
    if not direct:
        found = f"{read} through the page cache, as it refuses O_DIRECT; {left}"
        return Finding(part, "limited", found, _LOCAL, figures)
    if rate.value < _SLOW:
        return Finding(part, "limited", f"{read}, which is slow; {left}", _FASTER, figures)
    if room < _ROOM:
        remedy = "make room: an 8B model takes 16 GB, a 70B model 140 GB"
        return Finding(part, "limited", f"{read} past the page cache; only {left}", remedy, figures)
    return Finding(part, "ok", f"{read} past the page cache; {left}", figures=figures)


class _ReadError(Exception):
    """A file that was opened could not be read."""


def _measured(found: Sequence[Path]) -> tuple[bool, Rate]:
    """Whether files are read past the page cache, and how fast. Raises _ReadError."""
    from offspec_planners.measure.disk import disk_rate

    try:
        return _reads_directly(found[0]), disk_rate(found, _SECONDS)
    except (OSError, StreamError) as error:
        raise _ReadError(f"reading {found[0]} failed: {error}") from error


@contextmanager
def _readable(places: Sequence[Path]) -> Iterator[list[Path]]:
    """Files to read, large enough; one is written for it where there are none."""
    there = large_files(dict.fromkeys(file for place in places for file in in_folder(place)))
    if there:
        yield there
        return
    with written_file(places[0], f"change its permissions, or {ELSEWHERE}") as made:
        yield [made]


def _reads_directly(file: Path) -> bool:
    """Whether a page of a file comes past the page cache, by the reader that streams weights."""
    from offspec.stream.arena import PAGE, Arena
    from offspec.stream.direct_reader import DirectReader

    reader = DirectReader()
    try:
        reader.read_into(file, 0, Arena(PAGE).buffer, PAGE)
        return not reader.buffered
    finally:
        reader.close()


def file_system(folder: Path) -> str:
    """The kind of file system that a folder is on, such as "ext4"; "unknown" where that is not told."""
    place, longest, kind = files.real_path(folder), -1, "unknown"
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return kind
    for line in lines:
        fields, _, source = line.partition(" - ")
        mounted = Path(fields.split()[4].replace("\\040", " "))
        if place.is_relative_to(mounted) and len(mounted.parts) >= longest:
            longest, kind = len(mounted.parts), source.split()[0]
    return kind
