"""Argument checks made before a tensor's raw pointers are used."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from offspec_kernels.errors import ArgumentError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class TensorLike(Protocol):
    """Attributes shared by tensors and objects that stand in for tensors."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...


def check_shape(name: str, tensor: TensorLike, shape: Sequence[int | str]) -> None:
    """Raise unless `shape` matches: a number for a fixed size, a letter for any size."""
    sizes = tensor.shape
    fits = (size == wanted or isinstance(wanted, str) for size, wanted in zip(sizes, shape, strict=False))
    if len(sizes) == len(shape) and all(fits):
        return
    raise ArgumentError(name, f"the shape must be [{', '.join(map(str, shape))}], not {list(sizes)}")


def check_dtype(name: str, tensor: TensorLike, dtypes: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ArgumentError(
            name, f"the dtype must be {wanted}, not {str(tensor.dtype).removeprefix('torch.')}"
        )


def check_device(name: str, tensor: TensorLike, device: torch.device) -> None:
    if tensor.device != device:
        raise ArgumentError(name, f"must be on {device} like the first tensor, not on {tensor.device}")


def check_rows(name: str, tensor: Tensor) -> None:
    """Raise unless the last dimension is contiguous, as kernels require."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ArgumentError(
            name, f"the last dimension must be contiguous (stride 1), not stride {tensor.stride(-1)}"
        )


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
) -> None:
    """Check a tensor that kernels read row by row; `shape` as in `check_shape`."""
    check_shape(name, tensor, shape)
    check_dtype(name, tensor, dtypes)
    if device is not None:
        check_device(name, tensor, device)
    check_rows(name, tensor)


def check_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ArgumentError(name, "must be contiguous")


def check_logits(logits: Tensor) -> None:
    """Check logits [rows, V]; with bounded V, ids fit in int32 when a kernel rounds V up to whole blocks."""
    check_tensor("logits", logits, ["rows", "V"], FLOATS)
    if not 0 < logits.shape[1] <= 2**30:
        raise ArgumentError("logits", f"a row must have 1 to 2^30 tokens, not {logits.shape[1]}")


def check_noise(
    logits: Tensor,
    seed: int | None,
    positions: Sequence[int] | Tensor | None,
    noise: object | None,
    table: Tensor | None,
) -> None:
    """Check the noise arguments of logits [rows, V]: a seed with positions, or rows of noise made before.

    table: [S, V], by position. Values of positions on a device are not checked.
    """
    for name, made in (("noise", noise), ("table", table)):
        if seed is None and made is not None:
            raise ArgumentError(name, "rows of noise need the seed they were made from")
    if seed is not None and not 0 <= seed < 2**64:
        raise ArgumentError("seed", f"must be in [0, 2^64), not {seed}")
    if isinstance(positions, Tensor):
        check_tensor("positions", positions, [len(logits)], [torch.int64], logits.device)
    elif seed is not None:
        check_positions(len(logits), positions)
    if table is not None:
        check_tensor("table", table, ["S", logits.shape[1]], [torch.float32], logits.device)
        if not table.is_contiguous() or not len(table):
            raise ArgumentError("table", "must be contiguous and have at least one row")


def check_positions(rows: int, positions: Sequence[int] | None) -> None:
    if positions is None:
        raise ArgumentError("positions", "required with a seed, one for each row")
    if len(positions) != rows:
        raise ArgumentError("positions", f"must be one for each of {rows} rows, not {len(positions)}")
    if any(not 0 <= position < 2**63 for position in positions):
        raise ArgumentError("positions", "must be in [0, 2^63)")


def check_scale(name: str, scale: float) -> None:
    """Check a divisor of scores: a positive, normal float32."""
    if not 2.0**-126 <= scale <= torch.finfo(torch.float32).max:
        raise ArgumentError(name, f"must be a positive float32, not {scale}")
