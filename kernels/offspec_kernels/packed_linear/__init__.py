"""A product of rows and a weight as it is stored: its values are made a panel at a time, and never all."""

from collections.abc import Mapping

from torch import Tensor

from offspec_kernels.backend import Backend, choose_backend
from offspec_kernels.dequant import Format, dequantise
from offspec_kernels.dequant.format import Shape
from offspec_kernels.errors import ArgumentError
from offspec_kernels.row_linear import row_linear


def packed_linear(
    rows: Tensor,
    format: Format,
    parts: Mapping[str, Tensor],
    shape: Shape,
    bias: Tensor | None = None,
    *,
    path: Backend | None = None,
) -> Tensor:
    """`row_linear` of rows and the weight that `dequantise` makes, to the last bit: [T, N].

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

    Scratch: where the processor has `row_linear.blocks` and the format can be cut, a panel for each thread;
    else all values.
    """
    if len(shape) != 2 or rows.dim() != 2 or rows.shape[1] != shape[1]:
        raise ArgumentError("rows", f"must be [T, {shape[-1]}] for a weight of two dimensions")
    if choose_backend(rows.device, path) == "eager":
        from offspec_kernels.packed_linear import eager

        if eager.can_cut(rows, format, parts, shape):
            return eager.packed_linear(rows, format, parts, shape, bias)
    values = rows.new_empty(shape[0] * shape[1])
    return row_linear(rows, dequantise(format, parts, shape, values, path=path), bias, path=path)
