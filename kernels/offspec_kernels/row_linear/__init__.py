"""Product of rows and a weight in which a row's bits do not depend on the number of rows.

Letters: T rows, K columns, N rows of the weight, G groups, P rows of all groups.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from offspec_kernels.backend import Backend, choose_backend
from offspec_kernels.checks import FLOATS, check_device, check_dtype
from offspec_kernels.errors import ArgumentError


def row_linear(
    rows: Tensor, weight: Tensor, bias: Tensor | None = None, *, path: Backend | None = None
) -> Tensor:
    """Return rows times weight transposed, plus bias: [T, N], summed in float32; rounded once, then once
    more.

    In the triton backend each row is summed in the order of its columns, in tiles of one size for any T, so
    its bits depend only on that row and the weight. The same holds in the eager backend in bfloat16 if the
    CPU has a matrix unit (`blocks`). Otherwise the product is torch's, whose bits may depend on T.

    Args:
        rows: [T, K] float32, bfloat16 or float16.
        weight: [N, K] of the same dtype, contiguous along either dimension.
        bias: [N] of the same dtype, or None.
        path: Backend to use; by default the result of `choose_backend`.

    Raises:
        ArgumentError: An argument is invalid; the error names it.
        PathError: `path` cannot run here.
    """
    _check(rows, "weight", weight, bias)
    chosen = choose_backend(rows.device, path)
    if chosen == "triton":
        from offspec_kernels.row_linear import triton

        return triton.row_linear(rows, weight, bias)
    if chosen == "reference":
        out = (rows.double() @ weight.double().T).to(rows.dtype)
        return out if bias is None else (out.double() + bias.double()).to(rows.dtype)
    from offspec_kernels.row_linear import blocks

    if blocks.can_multiply(rows, weight) and blocks.replaces_torch():
        out = blocks.row_linear(rows, weight)
    else:  # with a matrix unit oneDNN reads past the odd end of a row, and a NaN there spreads
        out = F.linear(rows.contiguous(), weight)
    return out if bias is None else out + bias


def grouped_linear(
    rows: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    sources: Tensor,
    targets: Tensor,
    ends: Tensor,
    *,
    path: Backend | None = None,
) -> Tensor:
    """Return products of groups of rows, each with its own weight: [P, N], with zeros in rows not written.

    In the triton backend a row has the bits of `row_linear`, and the host never waits for the device, which
    alone has the group assignment.

    Args:
        rows: [T, K] float32, bfloat16 or float16.
        weights: [G, N, K] of the same dtype, each contiguous along one of the last two dimensions.
        bias: [G, N] of the same dtype, or None.
        sources: [P] int64, indices into `rows`, group by group; entries after the last group are ignored.
        targets: [P] int64, row of the result for each source; all different.
        ends: [G] int64, end of each group in `sources`, non-decreasing.
        path: Backend to use; by default the result of `choose_backend`.

    Raises:
        ArgumentError: An argument is invalid; the error names it.
        PathError: `path` cannot run here.
    """
    _check(rows, "weights", weights, bias)
    if ends.shape != weights.shape[:1]:
        raise ArgumentError("ends", f"must be [{len(weights)}], not {list(ends.shape)}")
    if sources.dim() != 1 or targets.shape != sources.shape:
        raise ArgumentError("targets", f"must be {list(sources.shape)}, not {list(targets.shape)}")
    for name, given in (("sources", sources), ("targets", targets), ("ends", ends)):
        check_dtype(name, given, (torch.int64,))
        check_device(name, given, rows.device)
    chosen = choose_backend(rows.device, path)
    if chosen == "triton":
        from offspec_kernels.row_linear import triton

        return triton.grouped_linear(rows, weights, bias, sources, targets, ends)
    out, begin = rows.new_zeros(len(sources), weights.shape[1]), 0
    for group, end in enumerate(ends.tolist()):
        if end > begin:
            given = rows[sources[begin:end]]
            shift = None if bias is None else bias[group]
            out[targets[begin:end]] = row_linear(given, weights[group], shift, path=chosen)
        begin = end
    return out


def _check(rows: Tensor, name: str, weight: Tensor, bias: Tensor | None) -> None:
    """Check one weight [N, K], or several [G, N, K] if the name is "weights"."""
    sizes = "G, N" if name == "weights" else "N"
    check_dtype("rows", rows, FLOATS)
    if rows.dim() != 2 or weight.dim() != 1 + len(sizes.split()) or weight.shape[-1] != rows.shape[1]:
        raise ArgumentError(name, f"must be [{sizes}, {rows.shape[-1]}], not {list(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:-1]:
        raise ArgumentError("bias", f"must be {list(weight.shape[:-1])}, not {list(bias.shape)}")
    for name_, given in ((name, weight), ("bias", bias)):
        if given is not None:
            check_device(name_, given, rows.device)
            check_dtype(name_, given, (rows.dtype,))
