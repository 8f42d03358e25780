"""Product of rows and a quantized weight, which is dequantized one panel at a time, never as a whole."""

from collections.abc import Mapping

import torch
from torch import Tensor

from offspec_kernels.backend import Backend, choose_backend
from offspec_kernels.dequant import Format
from offspec_kernels.dequant.format import Shape
from offspec_kernels.errors import ArgumentError


def is_supported(format: Format, shape: Shape) -> bool:
    """Return whether `packed_linear` supports bfloat16 rows and a weight [N, K] of this format on a CPU."""
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
    """Return rows times the weight that `dequantize` returns, summed like `row_linear.blocks`: [T, N].

    A row therefore has the same bits with any other number of rows.

    Returns None if the rows are not bfloat16 or `is_supported` returns False.

    Args:
        rows: [T, K] float32, bfloat16 or float16.
        format: Storage format of the weight.
        parts: Tensors as `format.parts(shape)` lists them, contiguous, all on the rows' device.
        shape: Shape of the weight, (N, K).
        bias: [N] of the rows' dtype, or None.
        path: Backend to use; by default the result of `choose_backend`.

    Raises:
        ArgumentError: A part or argument is invalid; the error names it.
        PathError: `path` cannot run here.

    Workspace: a panel for each thread, and its sums for all rows in float32.
    """
    if len(shape) != 2 or rows.dim() != 2 or rows.shape[1] != shape[1]:
        raise ArgumentError("rows", f"must be [T, {shape[-1]}] for a two-dimensional weight")
    if choose_backend(rows.device, path) != "eager":
        return None
    from offspec_kernels.packed_linear import eager

    return eager.packed_linear(rows, format, parts, shape, bias)
