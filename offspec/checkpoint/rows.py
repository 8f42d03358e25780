"""Reading tensors in blocks of rows, so that a large tensor is never in memory twice."""

from collections.abc import Iterator
from io import RawIOBase

import torch

from offspec.checkpoint.checksum import forget_pages
from offspec.checkpoint.tensors import TensorInfo, torch_dtype
from offspec.core.errors import TruncatedError
from offspec.core.files import as_read_error, open_regular


def row_blocks(
    found: TensorInfo | torch.Tensor, most: int, *, forget: bool = False
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield blocks of rows: their range and their stored values on the CPU, from first to last.

    Blocks of a file share one buffer. Raises TruncatedError, CheckpointError, and UnsupportedModelError for
    a dtype that torch lacks.

    Args:
        found: Location of a tensor in a file, or a tensor, which may be memory-mapped. A tensor without
            dimensions is one row.
        most: Maximum bytes per block; a larger row is a block of its own.
        forget: Drop the bytes from the page cache after reading.
    """
    shape = tuple(found.shape) or (1,)
    if 0 in shape:
        return
    row = found.nbytes // shape[0]
    step = max(1, most // max(row, 1))
    parts = [slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]
    if isinstance(found, torch.Tensor):
        yield from ((part, found.reshape(shape)[part]) for part in parts)
    else:
        yield from _read(found, shape, row, parts, forget)


def _read(
    info: TensorInfo, shape: tuple[int, ...], row: int, parts: list[slice], forget: bool
) -> Iterator[tuple[slice, torch.Tensor]]:
    dtype = torch_dtype(info.dtype)
    room = torch.empty((parts[0].stop - parts[0].start) * row, dtype=torch.uint8)
    with as_read_error(info.file), open(open_regular(info.file), "rb", buffering=0) as file:
        file.seek(info.offset)
        for part in parts:
            count = part.stop - part.start
            data = room[: count * row]
            _fill(data, file, info)
            if forget:
                forget_pages(file.fileno(), info.offset + part.start * row, len(data))
            yield part, data.view(dtype).reshape(count, *shape[1:])


def _fill(data: torch.Tensor, file: RawIOBase, info: TensorInfo) -> None:
    view, done = data.numpy().data, 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            raise TruncatedError(
                f"{info.file} is cut short at the tensor {info.name[:60]!r}, or changed while it was read; "
                "run the command again, or download the file again"
            )
        done += count
