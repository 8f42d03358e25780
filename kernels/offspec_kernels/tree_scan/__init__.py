"""Recurrence along the paths of a tree: linear attention, whose state is too large to keep for every node.

Letters: T rows, H heads, G heads of keys, D elements of a key, E of a value.

A state S [D, E] of each head is passed from row to row. Row t starts from its parent's state. With decay a:

    S = a S                                  a: one number, one per element of a key, or one per element of S
    v = beta (v - S^T k)                     only with beta: the delta rule
    S = S + k v^T
    o = S^T q                                output of the row

Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464) has a beta and one decay per head, Kimi's delta attention
(arXiv 2510.26692) one decay per element of a key. Mamba-2 (Dao and Gu 2024, arXiv 2405.21060) has k = B,
q = C, v = dt x and log a = dt A; Mamba-1 (Gu and Dao 2023, arXiv 2312.00752) has one head, with a separate
log a = dt A for each element of the state.

States are advanced row by row, following `order`, and never combined from parts, so that the bits of a row
depend only on its own path: a chunk of a prompt, a single path and a tree give the same bits.
"""

import torch
from torch import Tensor, float32

from offspec_kernels.backend import Backend, choose_backend
from offspec_kernels.checks import FLOATS, check_contiguous, check_device, check_dtype, check_shape
from offspec_kernels.errors import ArgumentError
from offspec_kernels.tree_scan.order import TraversalOrder, traversal_order

__all__ = ["TraversalOrder", "traversal_order", "tree_scan"]


def tree_scan(
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    state: Tensor,
    order: TraversalOrder,
    *,
    query: Tensor | None = None,
    beta: Tensor | None = None,
    rates: Tensor | None = None,
    final: Tensor | None = None,
    path: Backend | None = None,
) -> Tensor | None:
    """Advance a state along a tree; return the rows' outputs [T, H, E] float32 if `query` is given.

    Workspace: eager, `order.places` states of 64 columns per thread; triton, the same number of whole states,
    for a chain none.

    Args:
        key: [T, G, D]; H is a multiple of G, and heads that share a key are adjacent.
        value: [T, H, E].
        decay: log a, at most 0: [T, H], or [T, H, D]; with `rates`, dt [T, H, E].
        state: [H, D, E] float32, the state before all rows; not modified.
        order: Rows and their order (`traversal_order`); rows of the result not listed in it are not written.
        query: [T, G, D], or None: no outputs.
        beta: [T, H], or None: no delta rule.
        rates: [H, D, E] float32, A of log a = dt A; None: `decay` is the logarithm itself.
        final: [H, D, E] float32, overwritten by the state after the last step; may be `state` itself.
            None: discard that state.
        path: Backend to use; by default the result of `choose_backend`.

    Raises:
        ArgumentError: An argument is invalid; the error names it.
        PathError: `path` cannot run here.
    """
    _check(key, value, decay, state, query, beta, rates, final)
    chosen = choose_backend(key.device, path)
    out = None if query is None else torch.empty(value.shape, dtype=float32, device=value.device)
    query, beta = (None if given is None else given.float().contiguous() for given in (query, beta))
    key, value, decay = (given.float().contiguous() for given in (key, value, decay))
    scan = _reference_scan
    if chosen == "eager" and key.device.type == "cpu":
        from offspec_kernels.tree_scan.native import tree_scan as scan
    elif chosen == "triton":
        from offspec_kernels.tree_scan.triton import tree_scan as scan
    scan(query, key, value, decay, beta, rates, state, order, out, final)
    return out


def _reference_scan(
    query: Tensor | None, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None,
    rates: Tensor | None, state: Tensor, order: TraversalOrder, out: Tensor | None, final: Tensor | None,
) -> None:  # fmt: skip
    """Compute the recurrence as defined, in float64, with a state for every row."""
    group = value.shape[1] // key.shape[1]
    places = dict[int, Tensor]({0: state.double()})
    for row, source, target in zip(*map(list, (order.row, order.source, order.target)), strict=True):
        k = key[row].double().repeat_interleave(group, 0)
        log = decay[row].double()
        log = log.view(len(log), -1, 1) if rates is None else rates.double() * log[:, None, :]
        now = places[source] * log.exp()
        v = value[row].double()
        if beta is not None:
            v = beta[row].double()[:, None] * (v - torch.einsum("hde,hd->he", now, k))
        now = now + k[:, :, None] * v[:, None, :]
        places[target] = now
        if query is not None and out is not None:
            q = query[row].double().repeat_interleave(group, 0)
            out[row] = torch.einsum("hde,hd->he", now, q)
    if final is not None:
        final.copy_(places[order.target[-1]] if len(order.target) else state)


def _check(
    key: Tensor, value: Tensor, decay: Tensor, state: Tensor,
    query: Tensor | None, beta: Tensor | None, rates: Tensor | None, final: Tensor | None,
) -> None:  # fmt: skip
    check_shape("key", key, ["T", "G", "D"])
    rows, groups, size = key.shape
    check_shape("value", value, [rows, "H", "E"])
    heads, width = value.shape[1:]
    if groups == 0 or heads % groups:
        raise ArgumentError("key", f"{groups} heads of keys do not divide {heads} heads of values")
    each = [width] if rates is not None else [size] if decay.dim() == 3 else []
    check_shape("decay", decay, [rows, heads, *each])
    if query is not None:
        check_shape("query", query, [rows, groups, size])
    if beta is not None:
        check_shape("beta", beta, [rows, heads])
    for name, given in (("query", query), ("key", key), ("value", value), ("decay", decay), ("beta", beta)):
        if given is not None:
            check_dtype(name, given, FLOATS)
            check_device(name, given, key.device)
    for name, given in (("state", state), ("rates", rates), ("final", final)):
        if given is not None:
            check_shape(name, given, [heads, size, width])
            check_dtype(name, given, (float32,))
            check_device(name, given, key.device)
            check_contiguous(name, given)
