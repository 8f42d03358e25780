"""Packs of models: `pack_model` makes a missing one and repairs a damaged one, `verify_pack` checks one."""

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
from offspec.core.events import Event, Notice, unheard
from offspec.core.files import real_path, require_space, sync_folder
from offspec.core.memory import within_groups
from offspec.core.progress import ByteProgress
from offspec.model.quantize.pack.contents import (
    FileContents,
    packed_bytes,
    plan_contents,
    refuse_packed,
    refuse_rounded,
)
from offspec.model.quantize.pack.files import make_file, slab_weights
from offspec.model.quantize.pack.place import PackLocation, Unfinished, damaged
from offspec_planners.units import format_bytes

_TEXT_BYTES = 64 * 2**20  # tokenizer files, headers, rounding to blocks

Notify = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Pack:
    """A pack on disk. source_bytes: of the model's tensors; nbytes: of the pack's files of weights.

    files: how many those are; kept: how many of them were there before.
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
) -> Pack:
    """Round the matrices of a model's decoder layers, and write them to a model folder of their own.

    A run that is killed or interrupted loses the file that was under way; the same call resumes.

    Args:
        model: What `open_checkpoint` opens, in bf16, fp16 or fp32; a GGUF file is unpacked for it.
        to: "nf4", "int8" or "int4-g64".
        out: The folder to make; None: a place in the cache that belongs to the model's files.
        memory: Bytes of RAM for the whole process; None: some hundred megabytes more than it has.
        again: Read every file of a pack that is there already, and make damaged ones again. False: only check
            that it opens.
        twice: Also round a GGUF file whose weights were rounded before. Default False.
        notify: Takes LoadProgress and Notice events.
        cache_dir: The cache, instead of `OFFSPEC_CACHE` or `~/.cache/offspec`.

    Raises:
        RequestError: `out` is something else.
        CapacityError: There is too little memory.
        DiskFullError: The disk filled up.
        CheckpointError: The source cannot be read, or is quantised already.
    """
    began, notify = time.perf_counter(), notify or unheard
    memory = within_groups(memory, notify) if memory else None
    if not twice:
        refuse_rounded(model, notify)
    source = open_checkpoint(model, unpack=True, notify=notify, cache_dir=cache_dir)
    refuse_packed(source)
    path, is_local = local_path(model)  # a path that means the same in any folder
    origin = Origin(str(real_path(path)) if is_local else model, source.fingerprint, to)
    place = PackLocation.of(out, origin, cache_dir)
    with place.claimed(notify):
        there = place.there(origin, again, notify)
        kept = len(there.files) if there else 0
        if there is None:
            there, kept = _make(source, origin, place, memory, notify)
    nbytes = sum(file.sum.size for file in there.files.values())
    seconds = time.perf_counter() - began
    return Pack(place.folder, origin, source.nbytes, nbytes, len(there.files), kept, seconds)


def packed_model(
    model: str, to: PackFormat, notify: Notify, memory: int | None = None, cache_dir: Path | None = None
) -> Checkpoint:
    """The pack of a model, called by the model's name, made in the cache on first use; see `pack_model`."""
    pack = pack_model(model, to, memory=memory, again=False, notify=notify, cache_dir=cache_dir)
    return open_folder(pack.folder, model)


def verify_pack(folder: Path, notify: Notify) -> Manifest:
    """Read all files of a pack, compare them with its manifest, and return that.

    Args:
        folder: Of the pack.
        notify: Takes LoadProgress events.

    Raises:
        ModelNotFoundError: There is no pack.
        CheckpointError: Names the first file that is wrong and the command that repairs it.
    """
    check_pack(folder)
    manifest = read_manifest(folder)
    files = manifest.sums
    found = damaged(folder, files, f"verifying {folder.name}", notify, thorough=True)
    wrong = [f"{folder / name} {how}" for name, how in found]
    if wrong:
        more = f", and {len(wrong) - 1} more of its {len(files)} files" if len(wrong) > 1 else ""
        raise CheckpointError(f"{wrong[0]}{more}: {manifest.origin.again(folder)}")
    open_folder(folder)
    return manifest


def _make(
    source: Checkpoint, origin: Origin, place: PackLocation, memory: int | None, notify: Notify
) -> tuple[Manifest, int]:
    """The manifest of a pack that is made now, and how many of its files were there before."""
    contents = plan_contents(source, origin.format)
    with place.writing():
        unfinished = Unfinished(place.partial, origin, contents, notify)
    kept = len(unfinished.files)
    try:
        with place.writing():
            _make_files(unfinished, contents, source, place, memory, notify)
            if source.fingerprint != origin.fingerprint:
                unfinished.remove()
                raise CheckpointError(
                    f"{source.name} changed while it was packed: run the same command again"
                )
            manifest = unfinished.finish(source, place.folder)
    except BaseException:
        if unfinished.files:
            finished = f"{len(unfinished.files)} of {len(contents)} files are finished and kept"
            notify(Notice(f"{finished}: the same command goes on from there"))
        else:
            unfinished.remove()
        raise
    sync_folder(place.folder.parent)
    return manifest, kept


def _make_files(
    unfinished: Unfinished,
    contents: Sequence[FileContents],
    source: Checkpoint,
    place: PackLocation,
    memory: int | None,
    notify: Notify,
) -> None:
    """Make what is not finished. Raises CapacityError and DiskFullError before it begins."""
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
        layer = contents.index(file)  # the first file is what is no layer
        progress.detail = f"layer {layer} of {len(contents) - 1}" if layer else "embedding and head"
        unfinished.add(file.name, make_file(file, unfinished.folder, to, most, progress.add))
