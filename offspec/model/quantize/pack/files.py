"""One file of a pack, made from the tensors of the model a slab at a time."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from offspec.checkpoint.checksum import Summing
from offspec.checkpoint.pack_manifest import PackedFile
from offspec.checkpoint.rows import row_blocks
from offspec.checkpoint.tensors import TensorInfo, bytes_of, item_size
from offspec.checkpoint.write import SafetensorsWriter
from offspec.core import memory
from offspec.core.config import PackFormat
from offspec.core.errors import CapacityError, CheckpointError
from offspec.model.quantize.pack.contents import FLOATS, FileContents, stored_parts
from offspec.model.quantize.rounding import round_matrix
from offspec_kernels.dequant.codebook import quantise
from offspec_kernels.dequant.grouped import GROUP
from offspec_kernels.errors import ArgumentError
from offspec_planners.units import format_bytes

_MOST, _LEAST = 4 << 20, 1 << 18  # weights of a slab
_SCRATCH = 40  # bytes for each of them, while they are rounded in float32
_SLACK = 64 << 20  # what allocators and the system keep besides


def slab_weights(files: Sequence[FileContents], to: PackFormat, given: int | None) -> int:
    """Weights to round at a time, so that the process stays within `given` bytes of memory.

    Raises CapacityError where even the smallest slab does not fit.
    """
    if given is None:
        return _MOST
    every = [info.shape for file in files for info in file.packed]
    scales = max(
        sum(bytes_of(dtype, size) for _, dtype, size in stored_parts(shape, to)[1:]) for shape in every
    )
    fixed = memory.resident_bytes() + _SLACK + 2 * scales
    row = max(shape[-1] for shape in every)
    most = (given - fixed) // _SCRATCH
    least = max(_LEAST, row)
    if most < least:
        needed = fixed + least * _SCRATCH
        raise CapacityError(
            f"packing needs {format_bytes(needed)} of memory, and `memory` gives {format_bytes(given)}: "
            "raise it",
            needed=needed,
            given=given,
        )
    return min(most, _MOST)


def make_file(
    contents: FileContents, folder: Path, to: PackFormat, most: int, add: Callable[[int], None]
) -> PackedFile:
    """Write one file into a folder, whole or not at all. most: weights at a time; add: takes bytes read.

    Raises CheckpointError for a source that cannot be read, DiskFullError.
    """
    writer = SafetensorsWriter(folder / contents.name, contents.entries(to))
    seen = Summing(writer.start)
    writer.on_bytes = seen.add
    with writer as out:
        for info, rounds in contents.tensors:
            if rounds:
                _write_packed(out, info, to, most, add)
                continue
            for slab in _slabs(info, most):
                out.write(info.name, slab.to(torch.bfloat16) if info.dtype in FLOATS else slab)
                add(slab.nbytes)
    return PackedFile(seen.result(), {info.name: info.shape for info in contents.packed})


def _write_packed(
    out: SafetensorsWriter, info: TensorInfo, to: PackFormat, most: int, add: Callable[[int], None]
) -> None:
    """Write the codes as they come, and behind them what was gathered meanwhile: a sixteenth of them."""
    (codes, _, _), *others = stored_parts(info.shape, to)
    gathered: dict[str, list[torch.Tensor]] = {name: [] for name, _, _ in others}
    for slab in _slabs(info, most):
        try:
            parts = rounded(slab, to)
        except ArgumentError as error:
            raise CheckpointError(
                f"{info.name} in {info.file} cannot be packed to {to} ({error}): is the file damaged?"
            ) from error
        out.write(f"{info.name}.{codes}", parts[codes])
        for name, found in gathered.items():
            found.append(parts[name])
        add(slab.nbytes)
    for name, found in gathered.items():
        out.write(f"{info.name}.{name}", torch.cat(found))


def _slabs(info: TensorInfo, most: int) -> Iterator[torch.Tensor]:
    """The tensor as consecutive [rows, columns], of at most `most` elements each, but at least a row.

    columns: its last dimension; those before it are counted as rows. Raises CheckpointError for a file that
    cannot be read, or with values that are no numbers.
    """
    flat = replace(info, shape=(math.prod(info.shape[:-1]), info.shape[-1] if info.shape else 1))
    for _, slab in row_blocks(flat, most * item_size(info.dtype), forget=True):
        # By the least and the largest, which are NaN where any is: sooner than one by one.
        if slab.is_floating_point() and not all(math.isfinite(float(end)) for end in slab.aminmax()):
            raise CheckpointError(
                f"{info.file}: {info.name[:200]!r} has values that are no numbers; download it again"
            )
        yield slab


_STEPS = 255  # between the least and the largest of 256 codes
_LEAST_STEP = 2.0**-24  # the smallest float16 above 0
_AT_ONCE = 1 << 17  # weights of each thread; their float32 scratch stays in its cache


def rounded(rows: torch.Tensor, to: PackFormat) -> dict[str, torch.Tensor]:
    """The parts of rows [n, columns], any float dtype, columns whole groups.

    Parts of consecutive rows, one behind the other, are those of all rows. Raises ArgumentError for weights
    that scales in float16 have no room for.
    """
    least, most = rows.aminmax()
    if max(-float(least), float(most)) > torch.finfo(torch.float16).max:
        raise ArgumentError("weight", "all values must be below 65,520 in size")
    if to == "nf4":
        return quantise(rows, "nf4", GROUP)
    some = max(1, _AT_ONCE * torch.get_num_threads() // rows.shape[1])
    made = [_even_bytes(few) if to == "int8" else round_matrix(few, 4).parts for few in rows.split(some)]
    return {name: torch.cat([parts[name] for parts in made]) for name in made[0]}


def _even_bytes(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """256 even steps from the least weight of each group to its largest: 8 bits need no finer fitting."""
    groups = rows.float().view(-1, GROUP)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    step = ((high - low) / _STEPS).clamp_min_(_LEAST_STEP).half()
    offset = low.half()
    codes = ((groups - offset.float()) / step.float()).round_().clamp_(0, _STEPS).to(torch.uint8)
    scales = (len(rows), rows.shape[1] // GROUP)
    return {"codes": codes.view(rows.shape), "step": step.view(scales), "offset": offset.view(scales)}
