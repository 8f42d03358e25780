"""Checks that every door makes before it lets a tensor through to raw pointers."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from offspec_kernels.errors import ArgumentError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Shaped(Protocol):
    """What a tensor is known by, and what stands for one."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...


def check_shape(name: str, tensor: Shaped, shape: Sequence[int | str]) -> None:
    """`shape`: a number for a size that is known, a letter for one that may be anything."""
    sizes = tensor.shape
    if len(sizes) == len(shape):
        for size, wanted in zip(sizes, shape, strict=True):
            if size != wanted and not isinstance(wanted, str):
                break
        else:
            return
    raise ArgumentError(name, f"the shape must be [{', '.join(map(str, shape))}], not {list(sizes)}")


def check_dtype(name: str, tensor: Shaped, dtypes: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ArgumentError(
            name, f"the dtype must be {wanted}, not {str(tensor.dtype).removeprefix('torch.')}"
        )


def check_device(name: str, tensor: Shaped, device: torch.device) -> None:
    if tensor.device != device:
        raise ArgumentError(name, f"it must be on {device}, as the first tensor is, not on {tensor.device}")


def check_rows(name: str, tensor: Tensor) -> None:
    """The last dimension lies without gaps, as kernels read it."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ArgumentError(
            name, f"the last dimension must be contiguous, and its stride is {tensor.stride(-1)}"
        )


def check_logits(logits: Tensor) -> None:
    """[rows, V]; V leaves int32 ids room for the blocks that a kernel rounds it up to."""
    check_shape("logits", logits, ["rows", "V"])
    check_dtype("logits", logits, FLOATS)
    check_rows("logits", logits)
    if not 0 < logits.shape[1] <= 2**30:
        raise ArgumentError("logits", f"a row has 1 to 2^30 tokens, not {logits.shape[1]}")


def check_noise(rows: int, seed: int | None, positions: Sequence[int] | None) -> None:
    """What noise is looked up by: a seed, where there is noise at all, and a position for each row."""
    if seed is None:
        return
    if not 0 <= seed < 2**64:
        raise ArgumentError("seed", f"must be in [0, 2^64), not {seed}")
    if positions is None:
        raise ArgumentError("positions", "a seed needs them, one for each row")
    if len(positions) != rows:
        raise ArgumentError("positions", f"{len(positions)} for {rows} rows")
    if any(not 0 <= position < 2**63 for position in positions):
        raise ArgumentError("positions", "must be in [0, 2^63)")


def check_rows_of_noise(seed: int | None, noise: object | None) -> None:
    if seed is None and noise is not None:
        raise ArgumentError("noise", "rows of noise need the seed that they are made of")


def check_table(logits: Tensor, seed: int | None, table: Tensor | None) -> None:
    """Rows of noise [S, V] for logits [rows, V], by position."""
    if table is None:
        return
    if seed is None:
        raise ArgumentError("table", "rows of noise need the seed that they are made of")
    check_shape("table", table, ["S", logits.shape[1]])
    check_dtype("table", table, [torch.float32])
    check_device("table", table, logits.device)
    if not table.is_contiguous() or not len(table):
        raise ArgumentError("table", "it must be contiguous and have a row")


def check_scale(name: str, scale: float) -> None:
    """What scores are divided by: a float32 above 0 that has all its bits."""
    if not 2.0**-126 <= scale <= torch.finfo(torch.float32).max:
        raise ArgumentError(name, f"must be a positive float32, not {scale}")
