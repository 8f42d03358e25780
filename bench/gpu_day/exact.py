"""Accuracy of compiled kernels, and independence of a row's bits from the other rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.gpu_day.step_context import StepContext

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_MATRICES = ((8192, 8192), (1024, 8192), (8192, 28672), (576, 1536), (97, 80), (128256, 2048))  # (N, K)
_TREES = ((700, 60, 32, 8, 128), (5000, 200, 64, 8, 128), (2000, 100, 9, 3, 64), (1500, 40, 16, 4, 256))
_ROWS, _PARTS = 300, (1, 2, 63, 64, 65, 200)
# A kernel with a larger error than this is wrong: it allows several roundings, but no rounding to TF32.
_LEAST_ERROR = {"torch.float32": 1e-5, "torch.float16": 1e-3, "torch.bfloat16": 0.01}


def measure(context: StepContext) -> None:
    import torch

    torch.manual_seed(0)
    kinds = [torch.bfloat16] if context.dry else [torch.bfloat16, torch.float16, torch.float32]
    found = context.found
    found |= {"row_linear": [], "attention": [], "dequant": {}}
    for kind in kinds:
        for shape in ((96, 80),) if context.dry else _MATRICES:
            found["row_linear"].append(_row_linear(context, shape, kind))
            context.save()
    for kind in (kinds[0], kinds[-1]):
        for sizes in ((300, 9, 4, 2, 16),) if context.dry else _TREES:
            found["attention"].append(_attention(context, sizes, kind))
            context.save()
    _formats(context)
    found["noise"] = _noise(context)
    found["wrong"] = _wrong(found)
    found["short"] = f"{len(found['wrong'])} wrong"
    if found["wrong"]:
        found["error"] = str(found["wrong"])[:1500]


def _row_linear(context: StepContext, shape: tuple[int, int], kind: torch.dtype) -> dict[str, Any]:
    """Return the error of a product, and the row counts at which its rows have other bits."""
    import torch
    import torch.nn.functional as F

    from offspec_kernels.row_linear import row_linear

    weight = torch.randn(shape, device=context.device).mul_(shape[1] ** -0.5).to(kind)
    rows = torch.randn(66 if context.dry else _ROWS, shape[1], device=context.device).to(kind)
    whole = row_linear(rows, weight, path="triton")
    part = min(shape[0], 1024)
    wanted = F.linear(rows.double(), weight[:part].double())
    alone = {count: row_linear(rows[:count], weight, path="triton") for count in _PARTS if count < len(rows)}
    moved = row_linear(rows[5:6], weight, path="triton")
    return {
        "shape": shape,
        "dtype": str(kind),
        "error": _distance(whole[:, :part], wanted),
        "differ": [count for count, made in alone.items() if not torch.equal(made, whole[:count])]
        + ([] if torch.equal(moved, whole[5:6]) else ["row 5 alone"]),
        "library_keeps_bits": torch.equal(F.linear(rows[:1], weight), F.linear(rows, weight)[:1]),
    }


def _attention(context: StepContext, sizes: tuple[int, ...], kind: torch.dtype) -> dict[str, Any]:
    """Return the error of both attentions, and whether the last node has the same bits on its path alone."""
    import torch

    from bench.kernels.attention import ancestor_mask
    from offspec_kernels.tree_attention import tree_attention
    from offspec_kernels.tree_mask import TreeMask

    prefix, nodes, heads, key_heads, size = sizes
    query = torch.randn(1, heads, nodes, size, device=context.device).to(kind)
    key, value = (
        torch.randn(1, key_heads, prefix + nodes, size, device=context.device).to(kind) for _ in range(2)
    )
    sees = ancestor_mask(nodes, torch.device("cpu"))
    mask = TreeMask.of(sees.to(context.device), prefix=prefix)
    exact, draft = (
        tree_attention(query, key, value, mask, exact=exact, path="triton") for exact in (True, False)
    )
    wanted = tree_attention(query, key, value, mask, path="reference")
    path = torch.nonzero(sees[-1]).flatten()
    index = torch.cat([torch.arange(prefix), prefix + path]).to(context.device)
    chain = torch.ones(len(path), len(path), dtype=torch.bool, device=context.device).tril()
    alone = tree_attention(
        query[:, :, path.to(context.device)].contiguous(), key[:, :, index].contiguous(),
        value[:, :, index].contiguous(), TreeMask.of(chain, prefix=prefix), path="triton",
    )  # fmt: skip
    return {
        "sizes": sizes,
        "dtype": str(kind),
        "error": _distance(exact, wanted),
        "draft_error": _distance(draft, wanted),
        "differ": [] if torch.equal(alone[0, :, -1], exact[0, :, -1]) else ["the last node's path alone"],
    }


def _distance(found: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference relative to `wanted`'s; infinite if a number is NaN."""
    apart = ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()
    return apart if apart == apart else float("inf")


def _formats(context: StepContext) -> None:
    """Compare every quantized format with its reference, bit for bit."""
    from bench.kernels.dequant import FORMATS, check
    from bench.lib.cgroup import BenchError

    for name, format in FORMATS.items():
        if context.dry and name not in ("nf4", "Q4_K"):
            continue
        try:
            check(name, format, context.device)
            context.found["dequant"][name] = "same"
        except (BenchError, RuntimeError) as error:
            context.found["dequant"][name] = f"{type(error).__name__}: {error}"[:300]
    context.save()


def _noise(context: StepContext) -> list[bool]:
    """Return whether the device draws the host's numbers, at three positions."""
    import torch

    from offspec_kernels.noise import gumbel_row

    places = (0, 5, 1 << 31)
    host = [gumbel_row(7, place, 1000, torch.device("cpu")) for place in places]
    return [
        torch.equal(gumbel_row(7, place, 1000, context.device).cpu(), row)
        for place, row in zip(places, host, strict=True)
    ]


def _wrong(found: dict[str, Any]) -> list[Any]:
    wrong: list[Any] = [case for case in (*found["row_linear"], *found["attention"]) if _is_wrong(case)]
    wrong += [(name, state) for name, state in found["dequant"].items() if state != "same"]
    return wrong + ([] if all(found["noise"]) else ["noise"])


def _is_wrong(case: dict[str, Any]) -> bool:
    error = max(case["error"], case.get("draft_error", 0.0))
    return bool(case["differ"]) or error > _LEAST_ERROR[case["dtype"]]
