"""Tensors of a model read a few rows at a time, so that none needs to be in memory whole."""

import math
import os
from collections.abc import Iterator
from typing import Any

import torch

from offspec.checkpoint.checksum import forget_pages
from offspec.checkpoint.tensors import TensorInfo, item_size, torch_dtype
from offspec.core.errors import CheckpointError


def slabs(info: TensorInfo, most: int) -> Iterator[torch.Tensor]:
    """The tensor as consecutive [rows, columns], of at most `most` elements each, but at least a row.

    columns: its last dimension; those before it are counted as rows. What was read does not stay in the page
    cache. Raises CheckpointError for a file that cannot be read, or with values that are no numbers.
    """
    columns = info.shape[-1] if info.shape else 1
    rows = math.prod(info.shape[:-1])
    if rows * columns == 0:
        return
    step, dtype = max(1, most // columns), torch_dtype(info.dtype)
    row_bytes = columns * item_size(info.dtype)
    try:
        with info.file.open("rb", buffering=0) as file:
            for row in range(0, rows, step):
                count = min(step, rows - row)
                data = _read(info, file.fileno(), info.offset + row * row_bytes, count * row_bytes)
                slab = data.view(dtype).view(count, columns)
                if dtype.is_floating_point and not _is_finite(slab):
                    raise CheckpointError(
                        f"{info.file}: {info.name[:200]!r} has values that are no numbers; download it again"
                    )
                yield slab
    except OSError as error:
        raise CheckpointError(f"cannot read {info.file}: {error.strerror or error}") from error


def _is_finite(values: torch.Tensor) -> bool:
    """By the least and the largest, which are NaN where any is: sooner than one by one."""
    return all(math.isfinite(float(end)) for end in values.aminmax())


def _read(info: TensorInfo, fd: int, offset: int, count: int) -> torch.Tensor:
    """Bytes of a file, uint8 [count]."""
    memory = torch.empty(count, dtype=torch.uint8)
    array: Any = memory.numpy()
    target, done = memoryview(array), 0
    while done < count:
        got = os.preadv(fd, [target[done:]], offset + done)
        if not got:
            raise CheckpointError(f"{info.file} changed while it was read: pack it again")
        done += got
    forget_pages(fd, offset, count)
    return memory
