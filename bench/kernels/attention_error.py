"""What the rounding of an attention does to a real model in bfloat16, against the rounding of others.

    python -m bench.kernels.attention_error [MODEL] [--tokens 2048]

A text goes through the model once for each attention: torch's fused one, the same over keys of which 37 stand
twice, the first time masked (so that nothing changes but the order of sums), offspec's kernel, and one that
multiplies in bfloat16 throughout. Reported: the error of a layer's output against float64, on the queries and
keys of the first run, and how many of the top tokens differ from the first's. What float32 differs from
bfloat16 by is the scale to read the others on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from bench.lib.command import MODEL, Command
from bench.lib.process import ROOT
from bench.lib.report import Report, model_name

if TYPE_CHECKING:
    from torch import Tensor

NAME = "attention_error"
_TEXTS = ("README.md", "docs/structure.md", "bench/README.md")
_TWICE = 37  # keys that stand twice

Attend = Callable[["Tensor", "Tensor", "Tensor", float], "Tensor"]  # [1, H, T, D] and keys to [1, H, T, D]


def _fused(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    from torch.nn.functional import scaled_dot_product_attention

    return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)


def _moved(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    rows = query.shape[2]
    seen = torch.ones(rows, rows + _TWICE, dtype=torch.bool).tril(_TWICE)
    seen[:, :_TWICE] = False
    key, value = (torch.cat([each[:, :, :_TWICE], each], dim=2) for each in (key, value))
    return scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale, enable_gqa=True)


def _kernel(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    import torch

    from offspec_kernels.tree_attention import TreeMask, tree_attention

    rows = query.shape[2]
    tree_mask = TreeMask.of(torch.zeros(rows, 0, dtype=torch.bool), prefix=0, causal=rows)
    return tree_attention(query, key, value, tree_mask, scale=scale, path="eager")


def _plain(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    import torch

    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * scale
    hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill_(hidden, float("-inf")).softmax(dim=3, dtype=torch.float32)
    return weights.to(value.dtype) @ value


WAYS: dict[str, Attend] = {"fused": _fused, "fused, keys moved": _moved, "kernel": _kernel, "plain": _plain}


class Model:
    """A transformers model whose attention is whatever `attend` is."""

    def __init__(self, folder: Path, dtype: Any) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM

        AttentionInterface.register(NAME, self._called)
        self.attend: Attend = _fused
        self.inputs: list[tuple[Tensor, Tensor, Tensor, float]] | None = None
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self._model.set_attn_implementation(NAME)

    def _called(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        if self.inputs is not None:
            self.inputs.append((query, key, value, scaling))
        return self.attend(query, key, value, scaling).transpose(1, 2), None

    def top(self, ids: Tensor, attend: Attend) -> Tensor:
        """The likeliest token behind each of ids [1, T]."""
        self.attend = attend
        top: Tensor = self._model(ids).logits[0].argmax(dim=-1)
        return top


def layer_error(inputs: tuple[Tensor, Tensor, Tensor, float], attend: Attend) -> float:
    """RMS of what one layer's attention is off by, over the RMS of what it should be."""
    query, key, value, scale = inputs
    truth = _fused(query.double(), key.double(), value.double(), scale)
    off = attend(query, key, value, scale).double() - truth
    return float(off.pow(2).mean().sqrt() / truth.pow(2).mean().sqrt())


def measure(folder: Path, ids: Tensor) -> dict[str, Any]:
    """By way: the mean error of a layer, and the share of top tokens that differ from those of "fused"."""
    import torch

    with torch.inference_mode():
        exact = Model(folder, torch.float32).top(ids, _fused)
        model = Model(folder, torch.bfloat16)
        model.inputs = []
        first = model.top(ids, _fused)
        inputs, model.inputs = model.inputs, None
        found = {
            name: {
                "error": mean(layer_error(each, attend) for each in inputs),
                "changed": float((model.top(ids, attend) != first).double().mean()),
            }
            for name, attend in WAYS.items()
        }
    return {"ways": found, "float32_changed": float((exact != first).double().mean())}


def options(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", **MODEL)
    p.add_argument("--tokens", type=int, default=2048, help="of the text (default 2048)")


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Run the text through every attention and tell."""
    from transformers import AutoTokenizer

    from offspec.checkpoint import open_checkpoint

    folder = open_checkpoint(args.model, unpack=True).folder
    text = "\n".join((ROOT / name).read_text("utf-8") for name in _TEXTS)
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[:, : args.tokens]
    found = measure(folder, ids)
    report.ceiling(f"float32 changes {found['float32_changed']:.2%} of {ids.shape[1]} top tokens of bfloat16")
    for name, way in found["ways"].items():
        report.reached(f"{name:18} a layer is off by {way['error']:.5f}; changes {way['changed']:.2%}")
    summary = {**report.head(args), "model": model_name(args.model), "tokens": ids.shape[1], **found}
    report.record(summary)
    return summary


main = Command(
    "attention_error",
    "What the rounding of an attention does to a model.",
    options,
    bench,
    module="kernels.attention_error",
)

if __name__ == "__main__":
    sys.exit(main())
