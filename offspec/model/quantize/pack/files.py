"""Writing of one file of a pack from the model's tensors, a slab of rows at a time."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from offspec.checkpoint.checksum import FileHasher
from offspec.checkpoint.pack_manifest import PackedFile
from offspec.checkpoint.rows import row_blocks
from offspec.checkpoint.safetensors_writer import SafetensorsWriter
from offspec.checkpoint.tensors import TensorInfo, item_size, nbytes_of
from offspec.core import memory
from offspec.core.config import PackFormat
from offspec.core.errors import CapacityError, CheckpointError
from offspec.model.quantize.pack.contents import FLOATS, FileContents, stored_parts
from offspec.model.quantize.quantized_matrix import quantize_matrix
from offspec_kernels.dequant.codebook import quantize
from offspec_kernels.dequant.grouped import GROUP
from offspec_kernels.errors import ArgumentError
from offspec_planners.units import format_bytes

_MOST, _LEAST = 4 << 20, 1 << 18  # weights of a slab
_SCRATCH = 40  # bytes per weight of a slab for quantization in float32
_SLACK = 64 << 20  # additional bytes for allocators and the system


def slab_weights(files: Sequence[FileContents], to: PackFormat, given: int | None) -> int:
    """Return the weights per slab with which the process stays within `given` bytes of memory.

    Raises CapacityError if even the smallest slab does not fit.
    """
    if given is None:
        return _MOST
    every = [info.shape for file in files for info in file.packed]
    scales = max(
        sum(nbytes_of(dtype, size) for _, dtype, size in stored_parts(shape, to)[1:]) for shape in every
    )
    fixed = memory.resident_bytes() + _SLACK + 2 * scales
    row = max(shape[-1] for shape in every)
    most = (given - fixed) // _SCRATCH
    least = max(_LEAST, row)
    if most < least:
        needed = fixed + least * _SCRATCH
        raise CapacityError(
            f"packing needs {format_bytes(needed)} of memory, but `memory` is {format_bytes(given)}; "
            "increase it",
            needed=needed,
            given=given,
        )
    return min(most, _MOST)


def make_file(
    contents: FileContents, folder: Path, to: PackFormat, most: int, add: Callable[[int], None]
) -> PackedFile:
    """Write one file into a folder atomically.

    Args:
        contents: Contents of the file.
        folder: Folder of the pack.
        to: Format of the quantized weights.
        most: Maximum weights per slab.
        add: Called with the number of bytes read.

    Raises:
        CheckpointError: The source cannot be read.
        DiskFullError: The disk is full.
    """
    writer = SafetensorsWriter(folder / contents.name, contents.entries(to))
    seen = FileHasher(writer.start)
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
    """Write the codes slab by slab, then the other parts, which are a sixteenth of their size."""
    (codes, _, _), *others = stored_parts(info.shape, to)
    gathered: dict[str, list[torch.Tensor]] = {name: [] for name, _, _ in others}
    for slab in _slabs(info, most):
        try:
            parts = quantize_rows(slab, to)
        except ArgumentError as error:
            raise CheckpointError(
                f"{info.name} in {info.file} cannot be packed to {to} ({error}); the file may be damaged"
            ) from error
        out.write(f"{info.name}.{codes}", parts[codes])
        for name, found in gathered.items():
            found.append(parts[name])
        add(slab.nbytes)
    for name, found in gathered.items():
        out.write(f"{info.name}.{name}", torch.cat(found))


def _slabs(info: TensorInfo, most: int) -> Iterator[torch.Tensor]:
    """Yield a tensor in consecutive slabs [rows, columns] of at most `most` elements, but at least one row.

    Columns are the last dimension; all others are counted as rows. Raises CheckpointError if the file cannot
    be read, or has NaN or infinite values.
    """
    flat = replace(info, shape=(math.prod(info.shape[:-1]), info.shape[-1] if info.shape else 1))
    for _, slab in row_blocks(flat, most * item_size(info.dtype), forget=True):
        # Minimum and maximum are NaN if any value is; this is faster than checking each value.
        if slab.is_floating_point() and not all(math.isfinite(float(end)) for end in slab.aminmax()):
            raise CheckpointError(
                f"{info.file}: {info.name[:200]!r} has NaN or infinite values; download it again"
            )
        yield slab


_STEPS = 255  # between the smallest and the largest of 256 codes
_LEAST_STEP = 2.0**-24  # the smallest float16 above 0
_AT_ONCE = 1 << 17  # weights per thread, few enough that their float32 values stay in its CPU cache


def quantize_rows(rows: torch.Tensor, to: PackFormat) -> dict[str, torch.Tensor]:
    """Quantize rows [n, columns] of any float dtype; return the parts by name.

    Columns must be whole groups. The parts of consecutive rows can be concatenated. Raises ArgumentError for
    weights too large for float16 scales.
    """
    least, most = rows.aminmax()
    if max(-float(least), float(most)) > torch.finfo(torch.float16).max:
        raise ArgumentError("weight", "all values must be below 65,520 in size")
    if to == "nf4":
        return quantize(rows, "nf4", GROUP)
    some = max(1, _AT_ONCE * torch.get_num_threads() // rows.shape[1])
    made = [_even_bytes(few) if to == "int8" else quantize_matrix(few, 4).parts for few in rows.split(some)]
    return {name: torch.cat([parts[name] for parts in made]) for name in made[0]}


def _even_bytes(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantize to 256 uniform steps from each group's minimum to its maximum; 8 bits need no better fit."""
    groups = rows.float().view(-1, GROUP)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    step = ((high - low) / _STEPS).clamp_min_(_LEAST_STEP).half()
    offset = low.half()
    codes = ((groups - offset.float()) / step.float()).round_().clamp_(0, _STEPS).to(torch.uint8)
    scales = (len(rows), rows.shape[1] // GROUP)
    return {"codes": codes.view(rows.shape), "step": step.view(scales), "offset": offset.view(scales)}
