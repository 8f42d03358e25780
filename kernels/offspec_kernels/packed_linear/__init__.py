"""A product of rows and a weight as it is stored: its values are made a panel at a time, and never all."""

from collections.abc import Mapping

import torch
from torch import Tensor

from offspec_kernels.backend import Backend, choose_backend
from offspec_kernels.dequant import Format
from offspec_kernels.dequant.format import Shape
from offspec_kernels.errors import ArgumentError


def has_panels(format: Format, shape: Shape) -> bool:
    """Whether `packed_linear` makes products of bfloat16 rows and a weight [N, K] stored so, on a CPU."""
    if len(shape) != 2 or choose_backend(torch.device("cpu")) != "eager":
        return False
    from offspec_kernels.packed_linear import eager

    return eager.can_multiply(format, shape)


def packed_linear(
    rows: Tensor,
    format: Format,
    parts: Mapping[str, Tensor],
    shape: Shape,
    bias: Tensor | None = None,
    *,
    path: Backend | None = None,
) -> Tensor | None:
    """The product of rows and the weight that `dequantise` makes, as `row_linear.blocks` sums it up: [T, N].

    So a row has the bits that it has with any other number of rows.

    None: the rows are not bfloat16, or `has_panels` says no.

    Args:
        rows: [T, K] float32, bfloat16 or float16.
        format: How the weight is stored.
        parts: Tensors as `format.parts(shape)` lists them, contiguous, all on the rows' device.
        shape: Of the weight, (N, K).
        bias: [N] of the rows' dtype, or None.
        path: Backend to use, by default `choose_backend`'s.

    Raises:
        ArgumentError: Names the part or argument that is wrong.
        PathError: `path` cannot run here.

    Scratch: a panel for each thread, and its sums for all rows in float32.
    """
    if len(shape) != 2 or rows.dim() != 2 or rows.shape[1] != shape[1]:
        raise ArgumentError("rows", f"must be [T, {shape[-1]}] for a weight of two dimensions")
    if choose_backend(rows.device, path) != "eager":
        return None
    from offspec_kernels.packed_linear import eager

    return eager.packed_linear(rows, format, parts, shape, bias)
