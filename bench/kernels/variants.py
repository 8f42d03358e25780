"""Calls of every launcher of a Triton kernel, with all arguments that change the compiled kernel.

Tensors of a call are small and on the CPU. Compilation depends on dtypes, on a few sizes, and on which
arguments are given. Notation: see `offspec_kernels.tree_mask`; G query heads per key head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch

from bench.kernels.dequant import FORMATS
from offspec_kernels.dequant import Format
from offspec_kernels.dequant.awq import Awq
from offspec_kernels.dequant.codebook import Codebook
from offspec_kernels.dequant.compressed import CompressedInt
from offspec_kernels.dequant.ggml import Ggml
from offspec_kernels.dequant.gptq import Gptq
from offspec_kernels.gumbel_argmax.arguments import ArgmaxArguments
from offspec_kernels.gumbel_argmax.triton import pick
from offspec_kernels.kv_compact import KVTable
from offspec_kernels.kv_compact.triton import move
from offspec_kernels.noise.triton import fill_rows
from offspec_kernels.quantized_rows import QuantizedRows
from offspec_kernels.row_linear.triton import grouped_linear, row_linear
from offspec_kernels.topk_children.triton import children
from offspec_kernels.tree_attention import AttentionChunk, TreeMask
from offspec_kernels.tree_attention.arguments import AttentionArguments
from offspec_kernels.tree_attention.triton import attend
from offspec_kernels.tree_attention.triton_exact import attend as attend_exact
from offspec_kernels.tree_conv.triton import tree_conv
from offspec_kernels.tree_mask import Window
from offspec_kernels.tree_scan import traversal_order
from offspec_kernels.tree_scan.triton import tree_scan

# Sizes of a query and of a value: Llama 3.2 1B, Phi 2, Phi 3, Llama 3, expanded MLA, Gemma 2.
SIZES = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))
_PREFIX = 2000
_VOCABULARY = 128256
_MORE_FORMATS: dict[str, Format] = {
    "Q4_K-rows": Ggml("Q4_K", heads=4),
    "bnb-nf4-nested-float16": Codebook("nf4", 64, torch.uint8, 256, 0.1, torch.float16),
    "awq-g32": Awq(32),
    "gptq-int4-bfloat16": Gptq(4, 32, False, scales=torch.bfloat16),
    "gptq-int3-act-order": Gptq(3, 32, True),
    "ct-int3-act-order": CompressedInt(3, True, 32, False, act_order=True, scales=torch.float32),
    "ct-int8-zeros": CompressedInt(8, False, 0, True, scales=torch.float16),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """One call of a launcher: the operation, the name of the variant, and the call."""

    op: str
    name: str
    call: Callable[[], object]


def quick_variants() -> Iterator[Variant]:
    """Yield one call of each operation, as for a Llama 3 8B in NF4."""
    yield from _attention((128, 128), 4, torch.bfloat16, 16)
    yield from islice(_linear(torch.bfloat16, (16,)), 2)
    chosen = _sampling(torch.bfloat16, (8,))
    yield from (variant for variant in chosen if variant.name.endswith("noisy") or variant.op == "noise")
    yield next(_format("nf4", torch.bfloat16))
    yield next(_scan(128, 128, decays=1))
    yield next(_conv(torch.bfloat16))
    yield next(_moves())


def all_variants() -> Iterator[Variant]:
    """Yield all calls: tiles of every size, and every other compile-time option."""
    for sizes in SIZES:
        yield from _attention(sizes, 1, torch.bfloat16, 1)  # the smallest tile
        yield from _attention(sizes, 8, torch.bfloat16, 300)  # the largest
    for groups in range(2, 8):  # these only change the position of a row's query
        yield from _attention((128, 128), groups, torch.bfloat16, 16)
    for size in (64, 128, 256):
        yield from _attention((size, size), 1, torch.float32, 1)
        yield from _attention((size, size), 8, torch.float32, 300)
    for dtype in (torch.bfloat16, torch.float32):
        for sizes in ((128, 128), (256, 256)):
            yield from _attention(sizes, 2, dtype, 80, 900, 5.0)  # as Gemma 2
            yield from _attention(sizes, 8, dtype, 80, 900, sunk=True)  # as gpt-oss
    yield from _attention((128, 128), 5, torch.bfloat16, 80, AttentionChunk(8192))  # as Llama 4
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        yield from _linear(dtype, (1, 300))
    for dtype in (torch.bfloat16, torch.float32):
        yield from _sampling(dtype, (8, 32, 64))
        yield from _conv(dtype)
        for name in (*FORMATS, *_MORE_FORMATS):
            yield from _format(name, dtype)
    for size, width in ((64, 64), (96, 96), (128, 128), (256, 256), (1024, 64)):
        yield from _scan(size, width, decays=2)
    yield from _rated_scan(16, 4096)
    yield from _rated_scan(128, 64)
    yield from _moves()


def _attention(
    sizes: tuple[int, int],
    groups: int,
    dtype: torch.dtype,
    rows: int,
    window: Window | None = None,
    softcap: float | None = None,
    sunk: bool = False,
) -> Iterator[Variant]:
    """Yield both attentions of a chain of `rows` nodes after a prefix, with two key heads."""
    keys = _PREFIX + rows + 5
    query = torch.zeros(1, 2 * groups, rows, sizes[0], dtype=dtype)
    key = torch.zeros(1, 2, keys, sizes[0], dtype=dtype)
    value = torch.zeros(1, 2, keys, sizes[1], dtype=dtype)
    sees = torch.ones(rows, rows, dtype=torch.bool).tril()
    mask = TreeMask.of(sees, prefix=_PREFIX, position=torch.arange(_PREFIX, _PREFIX + rows))
    out = torch.zeros(1, 2 * groups, rows, sizes[1], dtype=dtype)
    sinks = torch.zeros(2 * groups) if sunk else None
    kind = [str(dtype)[6:], "x".join(map(str, sizes)), f"groups {groups}", f"rows {rows}"]
    kind += [f"window {window}"] * (window is not None) + [f"softcap {softcap}"] * (softcap is not None)
    name = ", ".join([*kind, *["sinks"] * sunk])
    given = AttentionArguments(query, key, value, mask, 0.1, window, softcap, sinks, out)
    yield Variant("tree_attention", name, partial(attend, given))
    yield Variant("tree_attention exact", name, partial(attend_exact, given))
    narrow = given._replace(key=QuantizedRows.of(key), value=QuantizedRows.of(value))
    call = partial(attend_exact, narrow)
    yield Variant("tree_attention exact", f"{name}, int8 keys", call)


def _linear(dtype: torch.dtype, counts: tuple[int, ...]) -> Iterator[Variant]:
    weight, bias = torch.zeros(512, 512, dtype=dtype), torch.zeros(512, dtype=dtype)
    for count in counts:
        for shift in (bias, None):
            name = f"{str(dtype)[6:]}, rows {count}{', bias' if shift is not None else ''}"
            given = torch.zeros(count, 512, dtype=dtype)
            yield Variant("row_linear", name, partial(row_linear, given, weight, shift))
            entries, groups = torch.arange(count), 8
            weights, shifts = weight.expand(groups, -1, -1), bias.expand(groups, -1)
            places = entries, entries, torch.full((groups,), count)
            call = partial(grouped_linear, given, weights, None if shift is None else shifts, *places)
            yield Variant("grouped_linear", name, call)


def _sampling(dtype: torch.dtype, counts: tuple[int, ...]) -> Iterator[Variant]:
    """Yield ranking and choosing, with and without noise and filters."""
    logits, kind = torch.zeros(3, _VOCABULARY, dtype=dtype), str(dtype)[6:]
    places = [4, 4, 5]
    least, tie = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
    kept = torch.zeros(64, _VOCABULARY)  # noise of 64 positions
    works = {
        "greedy": ArgmaxArguments(logits, None, None, 1.0, None, None, None),
        "noisy": ArgmaxArguments(logits, 1, places, 0.7, None, None, None),
        "noisy, filtered": ArgmaxArguments(logits, 1, places, 0.7, least, None, None),
        "noisy, filtered, ties": ArgmaxArguments(logits, 1, places, 0.7, least, tie, None),
        "noise at hand": ArgmaxArguments(logits, 1, places, 0.7, least, tie, None)._replace(table=kept),
    }
    for name, work in works.items():
        yield Variant("gumbel_argmax", f"{kind}, {name}", partial(pick, work))
    for count in counts:
        greedy = partial(children, logits, count, None, None, 1.0)
        noisy = partial(children, logits, count, 1, places, 0.8)
        yield Variant("topk_children", f"{kind}, {count}, greedy", greedy)
        yield Variant("topk_children", f"{kind}, {count}, noisy", noisy)
        at_hand = partial(children, logits, count, 1, places, 0.8, kept)
        yield Variant("topk_children", f"{kind}, {count}, noise at hand", at_hand)
    yield Variant("noise", kind, partial(fill_rows, kept, 1, 4, 9))


def _format(name: str, dtype: torch.dtype) -> Iterator[Variant]:
    format_, shape = {**FORMATS, **_MORE_FORMATS}[name], (64, 256)
    parts = {
        part: torch.zeros(stored.shape, dtype=stored.dtype) for part, stored in format_.parts(shape).items()
    }
    out = torch.zeros(shape, dtype=dtype)
    yield Variant("dequant", f"{name} to {str(dtype)[6:]}", partial(format_.triton, parts, shape, out))


def _scan(size: int, width: int, decays: int) -> Iterator[Variant]:
    """Yield scans with a decay per head and per key element, with and without the delta rule."""
    order, rows = traversal_order([-1, 0, 0]), 3
    given = torch.zeros(rows, 1, size), torch.zeros(rows, 1, size), torch.zeros(rows, 2, width)
    state, out = torch.zeros(2, size, width), torch.zeros(rows, 2, width)
    kinds: dict[str, Any] = {"by head": torch.zeros(rows, 2), "by number": torch.zeros(rows, 2, size)}
    for kind, decay in list(kinds.items())[:decays]:
        for beta in (torch.zeros(rows, 2), None):
            name = f"{size}x{width}, decay {kind}{', delta' if beta is not None else ''}"
            call = partial(tree_scan, *given, decay, beta, None, state, order, out, state)
            yield Variant("tree_scan", name, call)


def _rated_scan(size: int, width: int) -> Iterator[Variant]:
    """Yield a scan with a rate for each state element, as in Mamba."""
    rows = 3
    state, key, value = torch.zeros(1, size, width), torch.zeros(rows, 1, size), torch.zeros(rows, 1, width)
    order = traversal_order([-1, 0, 0])
    call = partial(tree_scan, key, key, value, value, None, state, state, order, value, state)
    yield Variant("tree_scan", f"{size}x{width}, rates", call)


def _conv(dtype: torch.dtype) -> Iterator[Variant]:
    inputs, window = torch.zeros(9, 512, dtype=dtype), torch.zeros(5, 4, dtype=torch.int64)
    taps = torch.zeros(512, 4, dtype=dtype)
    for bias in (torch.zeros(512, dtype=dtype), None):
        name = f"{str(dtype)[6:]}, 4 taps{', bias' if bias is not None else ''}"
        yield Variant("tree_conv", name, partial(tree_conv, inputs, window, taps, bias))


def _moves() -> Iterator[Variant]:
    for dtype in (torch.bfloat16, torch.float32):
        table = KVTable([torch.zeros(8, 90, 128, dtype=dtype)])
        yield Variant("kv_compact", str(dtype)[6:], partial(move, table, 3, [4, 7]))
