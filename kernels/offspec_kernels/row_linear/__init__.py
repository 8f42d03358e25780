"""A product of rows and a weight whose rows have the same bits however many there are.

Letters: T rows, K columns, N rows of the weight.
"""

from torch import Tensor

from offspec_kernels.backend import Backend, choose_backend
from offspec_kernels.checks import FLOATS, check_device, check_dtype
from offspec_kernels.errors import ArgumentError


def row_linear(
    rows: Tensor, weight: Tensor, bias: Tensor | None = None, *, path: Backend | None = None
) -> Tensor:
    """rows times weight transposed, plus bias: [T, N], summed up in float32 and rounded once, then once more.

    On the triton path each row is summed up in the order of its columns, in tiles of one size whatever T is,
    so that its bits depend on that row and the weight alone. So they do on the eager path in bfloat16 where
    the processor has a matrix unit (`blocks`); else it is torch's product, whose bits may depend on T.

    Args:
        rows: [T, K] float32, bfloat16 or float16.
        weight: [N, K] of the same dtype, contiguous along either dimension.
        bias: [N] of the same dtype, or None.
        path: Backend to use, by default `choose_backend`'s.

    Raises:
        ArgumentError: Names the argument that is wrong.
        PathError: `path` cannot run here.
    """
    check_dtype("rows", rows, FLOATS)
    if rows.dim() != 2 or weight.dim() != 2 or weight.shape[1] != rows.shape[1]:
        raise ArgumentError("weight", f"must be [N, {rows.shape[-1]}], not {list(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ArgumentError("bias", f"must be [{len(weight)}], not {list(bias.shape)}")
    for name, given in (("weight", weight), ("bias", bias)):
        if given is not None:
            check_device(name, given, rows.device)
            check_dtype(name, given, (rows.dtype,))
    chosen = choose_backend(rows.device, path)
    if chosen == "triton":
        from offspec_kernels.row_linear import triton

        return triton.row_linear(rows, weight, bias)
    if chosen == "eager":
        from offspec_kernels.row_linear import eager

        return eager.row_linear(rows, weight, bias)
    from offspec_kernels.row_linear import reference

    return reference.row_linear(rows, weight, bias)
