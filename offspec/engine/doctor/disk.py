"""Check of the disks with models: direct reads (O_DIRECT), speed and free space."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from offspec.core import files
from offspec.core.cache_dir import ELSEWHERE, cache_root
from offspec.core.errors import OffspecError, StreamError
from offspec.engine.doctor.finding import DoctorOptions, Figure, Finding
from offspec.plan.hardware_profile import in_folder, large_files, written_file
from offspec_planners.hardware_rates import Rate
from offspec_planners.units import format_bytes, format_rate

_ROOM = 20_000_000_000  # bytes; enough for an 8B model
_SLOW = 500_000_000  # bytes per second
_SECONDS = 0.1  # duration of each of several measurements
_MOUNTS = Path("/proc/self/mountinfo")
_LOCAL = "keep models on a local disk with ext4 or XFS: set HF_HOME and OFFSPEC_CACHE to folders on it"
_FASTER = (
    "keep models on a faster disk, if there is one: set HF_HOME and OFFSPEC_CACHE to folders on it. An NVMe "
    "disk reads 3 GB/s or more"
)


def check(options: DoctorOptions) -> Iterator[Finding]:
    """Yield a finding for each disk with offspec's cache, the Hugging Face cache or a named folder."""
    from huggingface_hub import constants

    named = [("cache", cache_root()), ("hub cache", Path(constants.HF_HUB_CACHE))]
    named += [(str(folder), folder) for folder in options.folders]
    disks = dict[int, list[tuple[str, Path]]]()
    for name, folder in named:
        place = _existing(folder)
        disks.setdefault(place.stat().st_dev, []).append((name, place))
    for found in disks.values():
        names = list(dict.fromkeys(name for name, _ in found))
        yield _disk(f"disk: {', '.join(names)}", [place for _, place in found])


def _existing(folder: Path) -> Path:
    """Return the folder, or its nearest existing parent."""
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def _disk(part: str, places: Sequence[Path]) -> Finding:
    """Measure a disk on large files in these folders, or on a temporary file in the first folder."""
    room, kind = shutil.disk_usage(places[0]).free, file_system(places[0])
    figures: dict[str, Figure] = {"folder": str(places[0]), "free": room, "file_system": kind}
    if not os.access(places[0], os.W_OK):
        found = f"{places[0]} cannot be written to"
        return Finding(part, "failed", found, f"change its permissions, or {ELSEWHERE}", figures)
    try:
        with _readable(places) as found_files:
            direct, rate = _measured(found_files)
    except _ReadError as error:
        return Finding(part, "failed", str(error), "check dmesg: the disk may be damaged", figures)
    except OffspecError as error:
        return Finding(part, "failed", str(error), figures=figures)
    figures |= {"direct": direct, "bytes_per_s": rate.value, "slowest": rate.low, "fastest": rate.high}
    read = f"{kind}, read at {format_rate(rate.value)}"
    left = f"{format_bytes(room)} free"
    if not direct:
        found = f"{read} through the page cache, because O_DIRECT is not supported; {left}"
        return Finding(part, "limited", found, _LOCAL, figures)
    if rate.value < _SLOW:
        return Finding(part, "limited", f"{read} (slow); {left}", _FASTER, figures)
    if room < _ROOM:
        remedy = "free disk space: an 8B model takes 16 GB, a 70B model 140 GB"
        return Finding(part, "limited", f"{read} past the page cache; only {left}", remedy, figures)
    return Finding(part, "ok", f"{read} past the page cache; {left}", figures=figures)


class _ReadError(Exception):
    """An opened file could not be read."""


def _measured(found: Sequence[Path]) -> tuple[bool, Rate]:
    """Return whether files can be read directly, and the read rate. Raises _ReadError."""
    from offspec_planners.measure.disk import disk_rate

    try:
        return _supports_direct_io(found[0]), disk_rate(found, _SECONDS)
    except (OSError, StreamError) as error:
        raise _ReadError(f"reading {found[0]} failed: {error}") from error


@contextmanager
def _readable(places: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield files that are large enough to measure; if there are none, write a temporary one."""
    there = large_files(dict.fromkeys(file for place in places for file in in_folder(place)))
    if there:
        yield there
        return
    with written_file(places[0], f"change its permissions, or {ELSEWHERE}") as made:
        yield [made]


def _supports_direct_io(file: Path) -> bool:
    """Return whether the reader that streams weights can read a page of a file with O_DIRECT."""
    from offspec.stream.arena import PAGE, Arena
    from offspec.stream.direct_reader import DirectReader

    reader = DirectReader()
    try:
        reader.read_into(file, 0, Arena(PAGE).buffer, PAGE)
        return not reader.buffered
    finally:
        reader.close()


def file_system(folder: Path) -> str:
    """Return the type of a folder's file system, such as "ext4", or "unknown"."""
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
