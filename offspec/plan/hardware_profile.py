"""Hardware profile of this machine, measured once per device and disk, and kept in the cache."""

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from stat import S_ISREG
from typing import Any

from offspec.checkpoint import local_path
from offspec.core.cache_dir import ELSEWHERE, cache_root
from offspec.core.errors import CapacityError, CheckpointError, OffspecError, PlanError, RequestError
from offspec.core.events import Event, LoadProgress, Notice
from offspec.core.files import as_disk_full_error, as_write_error, require_space, write_atomic
from offspec_planners.hardware_rates import Hardware, Identity, find_preset, preset, preset_names
from offspec_planners.units import format_rate

_FILE = "hardware.json"
_VERSION = 1
_STAGE = "measuring this machine"
_DEVICE_ROOM = 1_500_000_000
_WRITTEN = 512 << 20  # bytes of a test file, written if there is no large file to read
_BLOCK = 4 << 20
_ENOUGH = 256 << 20  # bytes of files that are large enough to read instead
_LARGE = 4 << 20  # minimum bytes of a file to read


@dataclass(frozen=True, slots=True)
class Profile:
    """A measured machine, and the time of the measurement (ISO 8601, UTC)."""

    hardware: Hardware
    measured: str


def load_hardware(name: str) -> Hardware:
    """Return a preset, or the profile in a JSON file.

    Args:
        name: Name of a preset, or a path. A preset may be abbreviated to a unique part, as 4090 for rtx-4090;
            an existing file of that name takes precedence.

    Raises:
        RequestError: There is neither.
        PlanError: The file is not a profile.
    """
    _, kind = local_path(name)
    known = name if kind else name.removesuffix(".json")
    if found := find_preset(known):
        return preset(found)
    try:
        return Hardware.load(Path(name))
    except OSError as error:
        raise RequestError(
            f"unknown hardware {name[:200]!r} (as a file: {error.strerror or error}); presets are "
            f"{', '.join(preset_names())}"
        ) from error
    except ValueError as error:
        raise PlanError(f"{name[:200]} is not a hardware profile: {error}") from error


def machine_fingerprint(device: str) -> str:
    """Return 12 hex digits that identify this machine with that device (the first of several), without
    measuring.
    """
    from offspec_planners.measure import identify

    return identify(device.split(",")[0]).fingerprint()


def profile(
    device: str,
    notify: Callable[[Event], None],
    *,
    remeasure: bool = False,
    files: Sequence[Path] = (),
    folder: Path | None = None,
) -> Profile:
    """Return the saved profile of this device and disk, or measure one if there is none or `remeasure` is
    set.

    Measuring takes some seconds. If no file on the disk is large enough, one is written and removed again.
    Implausible figures, and those measured while other processes were busy, are not saved; a Notice reports
    that.

    Args:
        device: "cpu", "cuda" or "cuda:1"; "auto": a usable GPU, else the CPU. Of several, the first.
        notify: Takes LoadProgress and Notice events.
        remeasure: Measure even if there is a saved profile. Default False.
        files: Files on the disk to measure; none by default.
        folder: A folder on that disk, if `files` is not given; None: the folder of the cached models.

    Raises:
        RequestError: The device or the folder does not exist.
        CapacityError: The device is full.
        CheckpointError: Files cannot be read.
        DiskFullError: The disk filled up.
    """
    if folder is not None and not folder.is_dir():
        raise RequestError(f"there is no folder {folder}; give a folder on the disk to measure")
    from offspec.model.devices import resolve_devices
    from offspec_planners.measure import identify

    device = resolve_devices(device).split(",")[0]
    files = files or large_files(in_folder(folder) if folder else in_caches())
    where = files[0] if files else made_folder(folder or cache_root())
    identity = identify(device)
    kept = _read(notify)
    key = _key(identity, where)
    if key in kept and not remeasure:
        return kept[key]
    if files:
        hardware, doubt = _measure(files, device, notify)
    else:
        variable = "`folder`" if folder else "OFFSPEC_CACHE"
        with written_file(where, "name a folder on the disk with `folder`", variable) as file:
            hardware, doubt = _measure([file], device, notify)
    made = Profile(hardware, datetime.now(UTC).isoformat(timespec="seconds"))
    if doubt:
        notify(Notice(f"{doubt}: these figures are not kept; measure again when other programs are done"))
    else:
        _write({**kept, key: made}, notify)
    return made


def _measure(files: Sequence[Path], device: str, notify: Callable[[Event], None]) -> tuple[Hardware, str]:
    """Measure the machine; return also a reason to doubt the figures, "" if there is none."""
    from offspec.model.cpu_contention import CpuContention
    from offspec_kernels.row_linear import row_linear
    from offspec_planners.measure import measure
    from offspec_planners.measure.disk import reads_past_cache

    _require_room(device)
    try:
        if not reads_past_cache(files[0]):
            notify(Notice("this file system has no O_DIRECT: the disk's rate may be that of the page cache"))
        with closing(CpuContention()) as contention:

            def tell(what: str, done: int, total: int) -> None:
                contention.poll()
                notify(LoadProgress(_STAGE, done, total, "steps"))

            hardware = measure(files, device, tell, row_linear)  # dtype that passes multiply in
    except OSError as error:
        raise CheckpointError(
            f"cannot measure the disk: reading {error.filename or files[0]} failed "
            f"({error.strerror or error}); name a folder on another disk with `folder`"
        ) from error
    if contention.was_busy:
        return hardware, "other processes used the CPU during the measurement"
    if not hardware.processor.read_memory:
        rate = format_rate(hardware.processor.bandwidth.value)
        return hardware, f"memory was read at {rate}, which is implausibly slow"
    return hardware, ""


def _require_room(device: str) -> None:
    """Raise CapacityError unless a CUDA device has room for the measurement."""
    import torch

    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if free < _DEVICE_ROOM:
            raise CapacityError(
                f"measuring takes 1.5 GB of device memory, and {free / 1e9:.2f} GB are free; "
                "close what else uses the device",
                needed=_DEVICE_ROOM,
                given=free,
            )


def _key(identity: Identity, where: Path) -> str:
    """Return the key of a profile: the machine with its device, and the disk that was read."""
    device = where.stat().st_dev
    return f"{identity.fingerprint()} {os.major(device)}:{os.minor(device)}"


def _read(notify: Callable[[Event], None]) -> dict[str, Profile]:
    """Read the saved profiles; empty, with a notice, if the file is damaged."""
    file = cache_root() / _FILE
    try:
        found = json.loads(file.read_bytes())
        if found["version"] != _VERSION:
            raise ValueError("another version")
        return {
            key: Profile(Hardware.from_json(entry["hardware"]), str(entry["measured"]))
            for key, entry in found["profiles"].items()
        }
    except OSError:
        return {}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        notify(Notice(f"{file} is damaged and will be written again"))
        return {}


def _write(profiles: Mapping[str, Profile], notify: Callable[[Event], None]) -> None:
    """Save the profiles. A failure is only a notice, since the measurement itself succeeded."""
    entries: dict[str, Any] = {
        key: {"measured": kept.measured, "hardware": kept.hardware.to_json()}
        for key, kept in profiles.items()
    }
    text = json.dumps({"version": _VERSION, "profiles": entries}, indent=1, ensure_ascii=False)
    try:
        write_atomic(made_folder(cache_root()) / _FILE, text.encode())
    except (OSError, OffspecError) as error:
        notify(Notice(f"the profile of this machine could not be saved: {error}"))


def in_folder(folder: Path) -> Iterator[Path]:
    """Yield the entries of a folder and of its subfolders."""
    for path in _listed(folder):
        yield path
        yield from _listed(path)


def in_caches() -> Iterator[Path]:
    """Yield weight files in the caches of offspec and of the hub's client."""
    from huggingface_hub import constants

    for room in _listed(cache_root()):
        for folder in _listed(room):
            yield from (file for file in _listed(folder) if file.suffix == ".safetensors")
    for model in _listed(Path(constants.HF_HUB_CACHE)):
        if model.name.startswith("models--"):
            yield from _listed(model / "blobs")


def _listed(folder: Path) -> list[Path]:
    """Return the entries of a folder; empty if it is not a folder, is not readable, or was removed
    meanwhile.
    """
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def large_files(found: Iterable[Path]) -> list[Path]:
    """Return large files that are on one disk, the largest first; empty if they are too small in total."""
    disks = dict[int, list[tuple[int, Path]]]()
    for path in found:
        try:
            about = path.stat()
        except OSError:  # a broken link, or an unreadable folder
            continue
        if S_ISREG(about.st_mode) and about.st_size >= _LARGE and os.access(path, os.R_OK):
            disks.setdefault(about.st_dev, []).append((about.st_size, path))
    if not disks:
        return []
    chosen = max(disks.values(), key=lambda files: sum(size for size, _ in files))
    if sum(size for size, _ in chosen) < _ENOUGH:
        return []
    return [path for _, path in sorted(chosen, reverse=True)]


def made_folder(folder: Path) -> Path:
    """Create the folder if it does not exist, and return it. Raises CheckpointError."""
    with as_write_error(folder, ELSEWHERE):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def written_file(folder: Path, fix: str, variable: str = "OFFSPEC_CACHE") -> Iterator[Path]:
    """Yield a large file to read. It has no name, so that it vanishes however this ends.

    fix: remedy for the error message if no file can be written. variable: name of the variable that sets
    another folder, for the error of a full disk. Raises CheckpointError, DiskFullError.
    """
    require_space(folder, _WRITTEN, "measuring the disk", variable)
    with (
        as_write_error(folder, fix),
        as_disk_full_error(folder, _WRITTEN),
        tempfile.TemporaryFile(dir=folder) as file,
    ):
        block = os.urandom(_BLOCK)  # zeros might never be written to the disk
        for _ in range(_WRITTEN // _BLOCK):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        yield Path(f"/proc/self/fd/{file.fileno()}")
