"""Creation, repair (`pack_model`) and verification (`verify_pack`) of packs."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from offspec.checkpoint import Checkpoint, open_checkpoint
from offspec.checkpoint.folder import open_folder
from offspec.checkpoint.open import local_path
from offspec.checkpoint.pack_manifest import Manifest, Origin, check_pack, read_manifest
from offspec.core.config import PackFormat
from offspec.core.errors import CheckpointError
from offspec.core.events import Event, Notice, ignore_event
from offspec.core.files import real_path, require_space, sync_folder
from offspec.core.memory import limit_to_cgroup
from offspec.core.progress import ByteProgress
from offspec.model.quantize.pack.contents import (
    FileContents,
    packed_bytes,
    plan_contents,
    refuse_packed,
    refuse_quantized,
)
from offspec.model.quantize.pack.files import make_file, slab_weights
from offspec.model.quantize.pack.location import PackLocation, PartialPack, find_damaged_files
from offspec_planners.units import format_bytes

_TEXT_BYTES = 64 * 2**20  # tokenizer files, headers, and rounding up to disk blocks

Notify = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class PackResult:
    """Pack on disk.

    Args:
        folder: Folder of the pack.
        origin: Model and format of the pack.
        source_bytes: Bytes of the model's tensors.
        nbytes: Bytes of the pack's weight files.
        files: Number of weight files.
        kept: Number of weight files that existed before.
        seconds: Time of the call.
    """

    folder: Path
    origin: Origin
    source_bytes: int
    nbytes: int
    files: int
    kept: int
    seconds: float


def pack_model(
    model: str,
    to: PackFormat,
    *,
    out: Path | None = None,
    memory: int | None = None,
    again: bool = True,
    twice: bool = False,
    notify: Notify | None = None,
    cache_dir: Path | None = None,
) -> PackResult:
    """Quantize the matrices of a model's decoder layers, and write them to a new model folder.

    If a run is killed or interrupted, only the file being written is lost; the same call resumes.

    Args:
        model: Model for `open_checkpoint`, in bf16, fp16 or fp32; a GGUF file is unpacked first.
        to: "nf4", "int8" or "int4-g64".
        out: Folder of the pack. Default: a folder in the cache that is specific to the model's files.
        memory: Bytes of RAM for the whole process. Default: some hundred megabytes more than it already uses.
        again: Whether to read every file of an existing pack, and to make damaged ones again. False: only
            check that the pack opens.
        twice: Whether to quantize a GGUF file that is already quantized. Default False.
        notify: Receives LoadProgress and Notice events.
        cache_dir: Cache folder, instead of `OFFSPEC_CACHE` or `~/.cache/offspec`.

    Raises:
        RequestError: `out` exists and is not this pack.
        CapacityError: There is too little memory.
        DiskFullError: The disk is full.
        CheckpointError: The source cannot be read, or is already quantized.
    """
    began, notify = time.perf_counter(), notify or ignore_event
    memory = limit_to_cgroup(memory, notify) if memory else None
    if not twice:
        refuse_quantized(model, notify)
    source = open_checkpoint(model, unpack=True, notify=notify, cache_dir=cache_dir)
    refuse_packed(source)
    path, is_local = local_path(model)  # absolute, so that it is valid in any folder
    origin = Origin(str(real_path(path)) if is_local else model, source.fingerprint, to)
    place = PackLocation.of(out, origin, cache_dir)
    with place.lock(notify):
        there = place.find_existing(origin, again, notify)
        kept = len(there.files) if there else 0
        if there is None:
            there, kept = _make(source, origin, place, memory, notify)
    nbytes = sum(file.checksum.size for file in there.files.values())
    seconds = time.perf_counter() - began
    return PackResult(place.folder, origin, source.nbytes, nbytes, len(there.files), kept, seconds)


def packed_model(
    model: str, to: PackFormat, notify: Notify, memory: int | None = None, cache_dir: Path | None = None
) -> Checkpoint:
    """Open the pack of a model under the model's name, making it in the cache on first use."""
    pack = pack_model(model, to, memory=memory, again=False, notify=notify, cache_dir=cache_dir)
    return open_folder(pack.folder, model)


def verify_pack(folder: Path, notify: Notify) -> Manifest:
    """Compare all files of a pack with its manifest; return the manifest.

    Args:
        folder: Folder of the pack.
        notify: Receives LoadProgress events.

    Raises:
        ModelNotFoundError: There is no pack.
        CheckpointError: A file is damaged; names the first such file and the command that repairs it.
    """
    check_pack(folder)
    manifest = read_manifest(folder)
    files = manifest.checksums
    found = find_damaged_files(folder, files, f"verifying {folder.name}", notify, thorough=True)
    wrong = [f"{folder / name} {how}" for name, how in found]
    if wrong:
        more = f", and {len(wrong) - 1} more of its {len(files)} files" if len(wrong) > 1 else ""
        raise CheckpointError(f"{wrong[0]}{more}: {manifest.origin.pack_command(folder)}")
    open_folder(folder)
    return manifest


def _make(
    source: Checkpoint, origin: Origin, place: PackLocation, memory: int | None, notify: Notify
) -> tuple[Manifest, int]:
    """Make a pack; return its manifest and the number of files that existed before."""
    contents = plan_contents(source, origin.format)
    with place.writing():
        unfinished = PartialPack(place.partial, origin, contents, notify)
    kept = len(unfinished.files)
    try:
        with place.writing():
            _make_files(unfinished, contents, source, place, memory, notify)
            if source.fingerprint != origin.fingerprint:
                unfinished.remove()
                raise CheckpointError(
                    f"{source.name} changed while it was packed; run the same command again"
                )
            manifest = unfinished.finish(source, place.folder)
    except BaseException:
        if unfinished.files:
            finished = f"{len(unfinished.files)} of {len(contents)} files are finished and kept"
            notify(Notice(f"{finished}; the same command resumes from there"))
        else:
            unfinished.remove()
        raise
    sync_folder(place.folder.parent)
    return manifest, kept


def _make_files(
    unfinished: PartialPack,
    contents: Sequence[FileContents],
    source: Checkpoint,
    place: PackLocation,
    memory: int | None,
    notify: Notify,
) -> None:
    """Make all unfinished files. Raises CapacityError or DiskFullError before the first."""
    to, kept = unfinished.origin.format, len(unfinished.files)
    todo = [file for file in contents if file.name not in unfinished.files]
    stage = f"packing {source.name} to {to}"
    require_space(place.folder.parent, packed_bytes(todo, to) + _TEXT_BYTES, stage, place.setting)
    most = slab_weights(contents, to, memory)
    if kept:
        notify(Notice(f"{kept} of {len(contents)} files were finished before and are kept"))
    sizes = f"{format_bytes(source.nbytes)} to {format_bytes(packed_bytes(contents, to))}"
    notify(Notice(f"{stage} once, from {sizes}, in {place.folder}"))
    total = sum(file.source_bytes for file in contents)
    progress = ByteProgress(stage, total, notify, total - sum(file.source_bytes for file in todo))
    for file in todo:
        layer = contents.index(file)  # the first file has everything outside the layers
        progress.detail = f"layer {layer} of {len(contents) - 1}" if layer else "embedding and head"
        unfinished.add(file.name, make_file(file, unfinished.folder, to, most, progress.add))
