"""Attention of a token tree: over the committed prefix, which all of it sees, and over its own ancestors."""

import torch
from torch import Tensor

from offspec_kernels.backend import Backend, choose_backend
from offspec_kernels.checks import FLOATS, check_device, check_dtype, check_shape, check_tensor
from offspec_kernels.chunks import split_evenly
from offspec_kernels.errors import ArgumentError
from offspec_kernels.quantised_rows import QuantisedRows, Rows, check_row_values, values_of
from offspec_kernels.tree_attention.arguments import Arguments
from offspec_kernels.tree_attention.sizes import (
    FEW,
    MOST_NUMBERS,
    STEP,
    gpu_scratch_bytes,
    list_bytes,
    scratch_bytes,
)
from offspec_kernels.tree_mask import Chunk, TreeMask, Window

_SCORES = 1 << 20  # that the reference makes at once: a GPU without triton has this path, too


def tree_attention(
    query: Tensor,
    key: Rows,
    value: Rows,
    tree_mask: TreeMask,
    *,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chosen: Tensor | None = None,
    out: Tensor | None = None,
    exact: bool = True,
    path: Backend | None = None,
) -> Tensor:
    """softmax(query key^T scale) value, of each query over the keys that `tree_mask` shows it.

    Tensors are float32, bfloat16 or float16, of one dtype and device, with a contiguous last dimension and
    free other strides. Keys and values may both be `QuantisedRows` of that dtype, and the result has the bits
    that their values would give; on a GPU sums of products come in another order, the same for every row.
    Queries of padding give zeros.

    Args:
        query: [B, H, N, D], H a multiple of KV, D at most 256.
        key: [B, KV, S, D]. Rows behind the last that a tree sees are not read: a cache at its whole capacity
            is allowed.
        value: [B, KV, S, E], E at most 256.
        tree_mask: Which keys each query sees, for B trees.
        scale: Factor of the scores, D^-0.5 by default.
        window: Positions that a query looks back, its own included, or a Chunk: it sees those of its own
            chunk of positions alone. No limit by default.
        softcap: c makes scores c tanh(score / c); none by default.
        sinks: [H], a score for each head that takes its share of the softmax without a value; none by
            default.
        chosen: [B, N, K] integers, rows of keys that an index has selected for each query (DeepSeek-V3.2,
            arXiv 2512.02556). A query that sees more than K keys attends to those of its own that it also
            sees, and any other to all that it sees. All by default; not together with a window.
        out: [B, H, N, E], overwritten; made by default.
        exact: Whether the bits of a query's result are to depend on its own keys alone, whatever else is
            asked and wherever its keys lie (eager, triton). A draft's few queries are done sooner without,
            and a CUDA graph may hold the kernels, which read lengths from the device.
        path: Backend to use, by default `choose_backend`'s.

    Raises:
        ArgumentError: Names the argument that is wrong.
        PathError: `path` cannot run here.

    Numerics: sums in float32 (float64 on the reference path); products of bfloat16 and float16 as they come,
    and weights rounded to that dtype before they meet the values.

    Scratch, beside `out`: eager, what `scratch_bytes` says, which is bounded whatever S is; triton, 64 MiB or
    a query's H S / 1024 (E + 2) float32, and where not exact and the prefix is split X ways, B H N X (E + 2).
    """
    _check(query, key, value, tree_mask, window, sinks)
    if chosen is not None:
        _check_chosen(chosen, query, key, window)
        if chosen.shape[2] >= max((reach.keys for reach in tree_mask.reaches()), default=0):
            chosen = None  # all of them
    if out is None:
        out = query.new_empty(*query.shape[:3], value.shape[3])
    else:
        check_tensor("out", out, [*query.shape[:3], value.shape[3]], [query.dtype], query.device)
    if not query.numel():
        return out
    scaling = query.shape[3] ** -0.5 if scale is None else scale
    given = Arguments(
        query, key, value, tree_mask, scaling, window, softcap or None, sinks, out, chosen, exact
    )
    attend = reference_attention
    match choose_backend(query.device, path):
        case "triton" if exact or chosen is not None or isinstance(key, QuantisedRows):
            from offspec_kernels.tree_attention.triton_exact import attend
        case "triton":
            from offspec_kernels.tree_attention.triton import attend
        case "eager" if query.device.type == "cpu":
            from offspec_kernels.tree_attention.eager import attend
    with torch.no_grad():
        attend(given)
    return out


def reference_attention(given: Arguments) -> None:
    """In float64 with a dense mask.

    Scratch: keys and values in float64, and several times _SCORES numbers.
    """
    query, sinks, chosen = given.query, given.sinks, given.chosen
    heads, key_heads = query.shape[1], given.key.shape[1]
    for tree, reach in given.trees():
        # [KV, S, D] and [KV, S, E]
        k, v = (values_of(of[tree, :, : reach.keys]).double() for of in (given.key, given.value))
        for rows in split_evenly(0, reach.count, max(_SCORES // (heads * max(reach.keys, 1)), 1)):
            q = query[tree, :, rows].double().reshape(key_heads, -1, query.shape[3])  # [KV, G n, D]
            scores = (q @ k.transpose(1, 2) * given.scale).view(heads, -1, reach.keys)  # [H, n, S]
            if given.softcap:
                scores = torch.tanh(scores / given.softcap) * given.softcap
            seen = given.tree_mask.visible(tree, (rows.start, rows.stop), (0, reach.keys), given.window)
            if chosen is not None:
                few = seen.sum(dim=1, keepdim=True) <= chosen.shape[2]
                seen &= few | torch.zeros_like(seen).scatter(1, chosen[tree, rows].long(), True)
            scores = scores.masked_fill(~seen, float("-inf"))
            if sinks is not None:
                aside = sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
                scores = torch.cat([scores, aside], dim=2)
            weights = torch.softmax(scores, dim=2)[:, :, : reach.keys].reshape(key_heads, -1, reach.keys)
            given.out[tree, :, rows] = (weights @ v).view(heads, -1, v.shape[2]).to(given.out.dtype)


def warm_up(dtype: torch.dtype) -> None:
    """Have the loops compiled that a CPU needs; the first time it takes some seconds."""
    keys = FEW + STEP  # some near, some far
    rows = torch.zeros(1, 1, keys, 8, dtype=dtype)
    one = TreeMask.of(torch.ones(1, 1, dtype=torch.bool), prefix=keys - 1)
    tree_attention(rows[:, :, :1], rows, rows, one, path="eager")


def _check(
    query: Tensor,
    key: Rows,
    value: Rows,
    tree_mask: TreeMask,
    window: Window | None,
    sinks: Tensor | None,
) -> None:
    check_shape("query", query, ["B", "H", "N", "D"])
    batch, heads, rows, size = query.shape
    check_shape("key", key, [batch, "KV", "S", size])
    check_shape("value", value, [batch, key.shape[1], key.shape[2], "E"])
    check_dtype("query", query, FLOATS)
    if isinstance(key, Tensor) != isinstance(value, Tensor):
        raise ArgumentError("value", "keys and values are both tensors, or both quantised")
    for name, rows_ in (("key", key), ("value", value)):
        check_dtype(name, rows_, [query.dtype])
        check_device(name, rows_, query.device)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_row_values(name, tensor)
        if not 0 < tensor.shape[3] <= MOST_NUMBERS:
            raise ArgumentError(name, f"heads have 1 to {MOST_NUMBERS} numbers, not {tensor.shape[3]}")
    if key.shape[1] == 0 or heads % key.shape[1]:
        raise ArgumentError("key", f"its {key.shape[1]} heads do not divide the query's {heads}")
    _check_mask(tree_mask, batch, rows, key.shape[2], query.device)
    reach = window.size if isinstance(window, Chunk) else window
    if reach is not None and reach < 1:
        raise ArgumentError("window", f"must be 1 or more, or None, not {reach}")
    if window and tree_mask.position is None:
        raise ArgumentError("tree_mask", "a window needs its positions, and it has none")
    if sinks is not None:
        check_tensor("sinks", sinks, [heads], FLOATS, query.device)


def _check_chosen(chosen: Tensor, query: Tensor, key: Rows, window: Window | None) -> None:
    check_shape("chosen", chosen, [query.shape[0], query.shape[2], "K"])
    check_dtype("chosen", chosen, [torch.int32, torch.int64])
    check_device("chosen", chosen, query.device)
    if not chosen.shape[2]:
        raise ArgumentError("chosen", "no keys are chosen")
    if window is not None:
        raise ArgumentError("chosen", "keys are chosen out of all, not out of a window's")


def _check_mask(tree_mask: TreeMask, batch: int, rows: int, keys: int, device: torch.device) -> None:
    if (batch, rows, keys) in tree_mask.fitting and tree_mask.words.device == device:
        return  # every layer of a pass asks
    for name in ("prefix", "first", "count", "causal"):
        check_tensor(f"tree_mask.{name}", getattr(tree_mask, name), [batch], [torch.int32], device)
    for reach in tree_mask.known:
        if reach.keys > keys or reach.count > rows:
            raise ArgumentError(
                "tree_mask",
                f"it speaks of {reach.count} queries and {reach.keys} keys, and there are {rows} and {keys}",
            )
        if tree_mask.position is not None and reach.first + reach.count > tree_mask.position.shape[1]:
            raise ArgumentError("tree_mask.position", "it ends before the last query")
    check_tensor("tree_mask.words", tree_mask.words, [batch, rows, "W"], [torch.int64], device)
    if tree_mask.position is not None:
        check_tensor("tree_mask.position", tree_mask.position, [batch, "M"], [torch.int64], device)
    tree_mask.fitting.add((batch, rows, keys))


__all__ = [
    "MOST_NUMBERS",
    "Chunk",
    "QuantisedRows",
    "TreeMask",
    "Window",
    "gpu_scratch_bytes",
    "list_bytes",
    "scratch_bytes",
    "tree_attention",
    "warm_up",
]
