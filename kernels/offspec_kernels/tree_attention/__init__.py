"""Attention of a token tree over the committed prefix and each token's own ancestors."""

import torch
from torch import Tensor

from offspec_kernels.backend import Backend, choose_backend
from offspec_kernels.checks import FLOATS, check_device, check_dtype, check_shape, check_tensor
from offspec_kernels.chunks import split_evenly
from offspec_kernels.errors import ArgumentError
from offspec_kernels.quantized_rows import QuantizedRows, Rows, check_row_values, values_of
from offspec_kernels.tree_attention.arguments import AttentionArguments
from offspec_kernels.tree_attention.sizes import (
    FEW,
    MOST_NUMBERS,
    STEP,
    gpu_scratch_bytes,
    list_bytes,
    scratch_bytes,
)
from offspec_kernels.tree_mask import AttentionChunk, TreeMask, Window

_SCORES = 1 << 20  # computed at once by the reference, which also runs on a GPU without triton


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
    """Return softmax(query key^T scale) value of each query over the keys visible in `tree_mask`.

    Tensors are float32, bfloat16 or float16, of one dtype and device, with a contiguous last dimension and
    arbitrary other strides. Keys and values may both be `QuantizedRows` of that dtype; the result then has
    the bits that their values would give. On a GPU, sums of products use another order, the same for every
    row. Padding queries give zeros.

    Args:
        query: [B, H, N, D], H a multiple of KV, D at most 256.
        key: [B, KV, S, D]. Rows after the last visible row are not read, so a cache may be passed at its
            full capacity.
        value: [B, KV, S, E], E at most 256.
        tree_mask: Keys visible to each query, for B trees.
        scale: Factor of the scores, D^-0.5 by default.
        window: Number of positions visible to a query, including its own, or an `AttentionChunk`, which
            limits a query to its own chunk of positions. No limit by default.
        softcap: c replaces scores by c tanh(score / c); none by default.
        sinks: [H], a score for each head that takes part in the softmax without a value; none by default.
        chosen: [B, N, K] integers, key rows selected by an index for each query (DeepSeek-V3.2, arXiv
            2512.02556). A query that sees more than K keys attends only to the visible ones among these;
            any other query attends to all visible keys. All by default; not allowed with a window.
        out: [B, H, N, E], overwritten; allocated by default.
        exact: Whether the bits of a query's result depend only on its own keys, whatever the other queries
            and the placement of the keys (eager, triton). A draft's few queries are faster without it; its
            kernels read lengths from the device, so a CUDA graph may hold them.
        path: Backend to use; by default the result of `choose_backend`.

    Raises:
        ArgumentError: An argument is invalid; the error names it.
        PathError: `path` cannot run here.

    Numerics: sums in float32 (float64 in the reference backend); products of bfloat16 and float16 unrounded,
    weights rounded to that dtype before they are multiplied by the values.

    Workspace, in addition to `out`: eager, `scratch_bytes`, bounded for any S; triton, 64 MiB or, for one
    query, H S / 1024 (E + 2) float32; if not exact and the prefix is split X ways, B H N X (E + 2).
    """
    _check(query, key, value, tree_mask, window, sinks)
    if chosen is not None:
        _check_chosen(chosen, query, key, window)
        if chosen.shape[2] >= max((reach.keys for reach in tree_mask.extents()), default=0):
            chosen = None  # all of them
    if out is None:
        out = query.new_empty(*query.shape[:3], value.shape[3])
    else:
        check_tensor("out", out, [*query.shape[:3], value.shape[3]], [query.dtype], query.device)
    if not query.numel():
        return out
    scaling = query.shape[3] ** -0.5 if scale is None else scale
    given = AttentionArguments(
        query, key, value, tree_mask, scaling, window, softcap or None, sinks, out, chosen, exact
    )
    attend = reference_attention
    match choose_backend(query.device, path):
        case "triton" if exact or chosen is not None or isinstance(key, QuantizedRows):
            from offspec_kernels.tree_attention.triton_exact import attend
        case "triton":
            from offspec_kernels.tree_attention.triton import attend
        case "eager" if query.device.type == "cpu":
            from offspec_kernels.tree_attention.eager import attend
    with torch.no_grad():
        attend(given)
    return out


def reference_attention(given: AttentionArguments) -> None:
    """Compute in float64 with a dense mask.

    Workspace: keys and values in float64, and several times _SCORES numbers.
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
    """Compile the loops that a CPU needs; the first time takes a few seconds."""
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
        raise ArgumentError("value", "keys and values must be both tensors or both quantized")
    for name, rows_ in (("key", key), ("value", value)):
        check_dtype(name, rows_, [query.dtype])
        check_device(name, rows_, query.device)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_row_values(name, tensor)
        if not 0 < tensor.shape[3] <= MOST_NUMBERS:
            raise ArgumentError(name, f"heads must have 1 to {MOST_NUMBERS} elements, not {tensor.shape[3]}")
    if key.shape[1] == 0 or heads % key.shape[1]:
        raise ArgumentError("key", f"number of heads {key.shape[1]} does not divide the query's {heads}")
    _check_mask(tree_mask, batch, rows, key.shape[2], query.device)
    reach = window.size if isinstance(window, AttentionChunk) else window
    if reach is not None and reach < 1:
        raise ArgumentError("window", f"must be 1 or more, or None, not {reach}")
    if window and tree_mask.position is None:
        raise ArgumentError("tree_mask", "a window needs positions, and the mask has none")
    if sinks is not None:
        check_tensor("sinks", sinks, [heads], FLOATS, query.device)


def _check_chosen(chosen: Tensor, query: Tensor, key: Rows, window: Window | None) -> None:
    check_shape("chosen", chosen, [query.shape[0], query.shape[2], "K"])
    check_dtype("chosen", chosen, [torch.int32, torch.int64])
    check_device("chosen", chosen, query.device)
    if not chosen.shape[2]:
        raise ArgumentError("chosen", "must choose at least one key")
    if window is not None:
        raise ArgumentError("chosen", "cannot be combined with a window")


def _check_mask(tree_mask: TreeMask, batch: int, rows: int, keys: int, device: torch.device) -> None:
    if (batch, rows, keys) in tree_mask.fitting and tree_mask.words.device == device:
        return  # already checked by an earlier layer of the pass
    for name in ("prefix", "first", "count", "causal"):
        check_tensor(f"tree_mask.{name}", getattr(tree_mask, name), [batch], [torch.int32], device)
    for reach in tree_mask.known:
        if reach.keys > keys or reach.count > rows:
            raise ArgumentError(
                "tree_mask",
                f"has {reach.count} queries and {reach.keys} keys, but the tensors have {rows} and {keys}",
            )
        if tree_mask.position is not None and reach.first + reach.count > tree_mask.position.shape[1]:
            raise ArgumentError("tree_mask.position", "must reach the last query")
    check_tensor("tree_mask.words", tree_mask.words, [batch, rows, "W"], [torch.int64], device)
    if tree_mask.position is not None:
        check_tensor("tree_mask.position", tree_mask.position, [batch, "M"], [torch.int64], device)
    tree_mask.fitting.add((batch, rows, keys))


__all__ = [
    "MOST_NUMBERS",
    "AttentionChunk",
    "QuantizedRows",
    "TreeMask",
    "Window",
    "gpu_scratch_bytes",
    "list_bytes",
    "scratch_bytes",
    "tree_attention",
    "warm_up",
]
