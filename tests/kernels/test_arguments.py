"""A wrong argument of an operation is named, whatever else is right."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from offspec.sampling.noise import GumbelNoise
from offspec_kernels.errors import ArgumentError
from offspec_kernels.gumbel_argmax import gumbel_argmax
from offspec_kernels.kv_compact import KVTable, kv_compact
from offspec_kernels.quantized_rows import QuantizedRows
from offspec_kernels.row_linear import grouped_linear, row_linear
from offspec_kernels.topk_children import BLOCK, topk_children
from offspec_kernels.tree_attention import AttentionChunk, TreeMask, tree_attention
from offspec_kernels.tree_conv import tree_conv
from offspec_kernels.tree_scan import traversal_order, tree_scan

zeros = torch.zeros
INT, LONG, HALF, BRAIN, DOUBLE = torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float64
META = torch.device("meta")
MASK = TreeMask.of(
    torch.ones(6, 6, dtype=torch.bool).tril(), prefix=10, causal=2, position=torch.arange(10, 18)
)
ROWS = QuantizedRows.of(zeros(1, 2, 18, 32))
_rows = partial(replace, ROWS)

RIGHT: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "tree_attention": (
        tree_attention,
        {
            "query": zeros(1, 4, 6, 32),
            "key": zeros(1, 2, 18, 32),
            "value": zeros(1, 2, 18, 32),
            "tree_mask": MASK,
        },
    ),
    "gumbel_argmax": (gumbel_argmax, {"logits": zeros(2, 8), "seed": 1, "positions": [1, 2]}),
    "topk_children": (topk_children, {"logits": zeros(3, 9), "count": 2}),
    "tree_scan": (
        tree_scan,
        {
            "key": zeros(3, 2, 33),
            "value": zeros(3, 4, 70),
            "decay": zeros(3, 4),
            "query": zeros(3, 2, 33),
            "beta": zeros(3, 4),
            "state": zeros(4, 33, 70),
            "order": traversal_order([-1, 0, 1]),
        },
    ),
    "tree_conv": (
        tree_conv,
        {"inputs": zeros(5, 6), "window": zeros(2, 3, dtype=LONG), "weight": zeros(6, 3), "bias": zeros(6)},
    ),
    "row_linear": (row_linear, {"rows": zeros(2, 3), "weight": zeros(4, 3), "bias": zeros(4)}),
    "grouped_linear": (
        grouped_linear,
        {
            "rows": zeros(3, 4),
            "weights": zeros(2, 5, 4),
            "bias": zeros(2, 5),
            "sources": zeros(3, dtype=LONG),
            "targets": torch.arange(3),
            "ends": torch.tensor([1, 3]),
        },
    ),
    "kv_compact": (kv_compact, {"table": KVTable([zeros(2, 9, 4)]), "start": 3, "rows": [4, 6]}),
    "KVTable": (KVTable, {"tensors": [zeros(2, 4, 4)]}),
}
WRONG: list[tuple[str, str, dict[str, Any]]] = [
    ("tree_attention", "query", {"query": zeros(4, 6, 32)}),
    ("tree_attention", "query", {"query": zeros(1, 4, 32, 6).transpose(2, 3)}),
    ("tree_attention", "query", {"query": zeros(1, 4, 6, 320), "key": zeros(1, 2, 18, 320)}),
    ("tree_attention", "key", {"key": zeros(1, 2, 18, 16)}),
    ("tree_attention", "key", {"key": zeros(1, 3, 18, 32), "value": zeros(1, 3, 18, 32)}),
    ("tree_attention", "key", {"key": zeros(1, 2, 18, 32, dtype=BRAIN)}),
    ("tree_attention", "value", {"value": zeros(1, 2, 15, 32)}),
    ("tree_attention", "value", {"value": ROWS}),
    ("tree_attention", "key.scales", {"key": _rows(scales=ROWS.scales[..., :-1])}),
    ("tree_attention", "key.scales", {"key": _rows(scales=ROWS.scales.double())}),
    ("tree_attention", "key.codes", {"key": _rows(codes=ROWS.codes.float())}),
    ("tree_attention", "key", {"key": _rows(dtype=BRAIN)}),
    ("tree_attention", "out", {"out": zeros(1, 4, 6, 16)}),
    ("tree_attention", "sinks", {"sinks": zeros(3)}),
    ("tree_attention", "sinks", {"sinks": zeros(8)[::2]}),
    ("tree_attention", "window", {"window": 0}),
    ("tree_attention", "window", {"window": AttentionChunk(0)}),
    ("tree_attention", "chosen", {"chosen": zeros(1, 7, 3, dtype=INT)}),
    ("tree_attention", "chosen", {"chosen": zeros(1, 6, 3, dtype=INT), "window": 4}),
    ("tree_attention", "chosen", {"chosen": zeros(1, 6, 3)}),
    ("tree_attention", "path", {"path": "fast"}),
    ("tree_attention", "tree_mask.words", {"query": zeros(1, 4, 9, 32)}),
    ("tree_attention", "tree_mask", {"key": zeros(1, 2, 17, 32), "value": zeros(1, 2, 17, 32)}),
    ("tree_attention", "tree_mask", {"tree_mask": TreeMask.of(torch.eye(6).bool(), prefix=12), "window": 4}),
    ("gumbel_argmax", "logits", {"logits": zeros(3)}),
    ("gumbel_argmax", "logits", {"logits": zeros(2, 0)}),
    ("gumbel_argmax", "logits", {"logits": zeros(8, 2).T}),
    ("gumbel_argmax", "seed", {"seed": 2**64}),
    ("gumbel_argmax", "positions", {"positions": None}),
    ("gumbel_argmax", "positions", {"positions": [1]}),
    ("gumbel_argmax", "positions", {"positions": [1, -1]}),
    ("gumbel_argmax", "temperature", {"temperature": 0.0}),
    ("gumbel_argmax", "temperature", {"temperature": math.inf}),
    ("gumbel_argmax", "temperature", {"temperature": 1e-45}),
    ("gumbel_argmax", "min_score", {"min_score": zeros(3)}),
    ("gumbel_argmax", "last_tie", {"last_tie": zeros(2, dtype=INT), "min_score": zeros(2)}),
    ("gumbel_argmax", "last_tie", {"last_tie": zeros(2, dtype=LONG)}),
    ("topk_children", "logits", {"logits": zeros(9)}),
    ("topk_children", "logits", {"logits": zeros(9, 3).T}),
    ("topk_children", "count", {"count": 0}),
    ("topk_children", "count", {"count": 10}),
    ("topk_children", "tau", {"tau": 0.0}),
    ("topk_children", "tau", {"tau": math.nan}),
    ("topk_children", "seed", {"seed": 2**64, "positions": [1, 2, 3]}),
    ("topk_children", "positions", {"seed": 1}),
    ("topk_children", "positions", {"seed": 1, "positions": [1, 2]}),
    ("topk_children", "positions", {"seed": 1, "positions": [1, 2, -3]}),
    ("topk_children", "positions", {"seed": 1, "positions": zeros(2, dtype=LONG)}),
    ("topk_children", "positions", {"seed": 1, "positions": zeros(3, dtype=LONG, device=META)}),
    ("topk_children", "noise", {"noise": GumbelNoise(1, 9).row}),
    ("topk_children", "table", {"table": zeros(4, 9)}),
    ("topk_children", "table", {"table": zeros(4, 8), "seed": 1, "positions": [0, 1, 2]}),
    ("topk_children", "scratch", {"scratch": zeros(3, 9)}),
    ("topk_children", "scratch", {"scratch": zeros(BLOCK, 3).T}),
    ("tree_scan", "key", {"key": zeros(3, 4)}),
    ("tree_scan", "key", {"key": zeros(3, 3, 33), "query": zeros(3, 3, 33)}),
    ("tree_scan", "value", {"value": zeros(2, 4, 70)}),
    ("tree_scan", "decay", {"decay": zeros(3, 2)}),
    ("tree_scan", "decay", {"decay": zeros(3, 4, 70)}),
    ("tree_scan", "decay", {"rates": zeros(4, 33, 70)}),
    ("tree_scan", "query", {"query": zeros(3, 2, 32)}),
    ("tree_scan", "beta", {"beta": zeros(3, 2)}),
    ("tree_scan", "state", {"state": zeros(4, 70, 33)}),
    ("tree_scan", "state", {"state": zeros(4, 70, 33).mT}),
    ("tree_scan", "final", {"final": zeros(4, 33)}),
    ("tree_conv", "inputs", {"inputs": zeros(5)}),
    ("tree_conv", "inputs", {"inputs": zeros(6, 5).T}),
    ("tree_conv", "window", {"window": zeros(2, 4, dtype=LONG)}),
    ("tree_conv", "window", {"window": zeros(2, 3)}),
    ("tree_conv", "weight", {"weight": zeros(5, 3)}),
    ("tree_conv", "bias", {"bias": zeros(3)}),
    ("row_linear", "weight", {"weight": zeros(4, 5)}),
    ("row_linear", "weight", {"weight": zeros(4, 3, dtype=HALF)}),
    ("row_linear", "bias", {"bias": zeros(3)}),
    ("grouped_linear", "weights", {"weights": zeros(2, 5, 3)}),
    ("grouped_linear", "weights", {"weights": zeros(2, 5, 4, dtype=HALF)}),
    ("grouped_linear", "bias", {"bias": zeros(2, 4)}),
    ("grouped_linear", "targets", {"targets": torch.arange(2)}),
    ("grouped_linear", "sources", {"sources": zeros(3, dtype=INT)}),
    ("grouped_linear", "ends", {"ends": torch.tensor([1])}),
    ("kv_compact", "start", {"start": -1}),
    ("kv_compact", "rows", {"rows": [4, 4]}),
    ("kv_compact", "rows", {"rows": [5, 4]}),
    ("kv_compact", "rows", {"rows": [2, 4]}),
    ("kv_compact", "rows", {"rows": [4, 9]}),
    ("KVTable", "tensors", {"tensors": []}),
    ("KVTable", "tensors", {"tensors": [zeros(4, 4)]}),
    ("KVTable", "tensors", {"tensors": [zeros(2, 2, 4, 4)]}),
    ("KVTable", "tensors", {"tensors": [zeros(2, 4, 4), zeros(2, 4, 4, device=META)]}),
    ("KVTable", "tensors", {"tensors": [zeros(2, 4, 4).transpose(1, 2)]}),
]


@pytest.mark.parametrize("name", RIGHT)
def test_wrong_arguments_are_named(name: str) -> None:
    operation, right = RIGHT[name]
    operation(**right)
    wrong = [(argument, change) for other, argument, change in WRONG if other == name]
    for place, (argument, change) in enumerate(wrong):
        given = {**right, **change}
        if name == "tree_attention" and isinstance(given["key"], QuantizedRows):
            given["value"] = ROWS
        with pytest.raises(ArgumentError) as caught:
            operation(**given)
        assert caught.value.argument == argument, f"number {place}: {caught.value}"
