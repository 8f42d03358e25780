"""Default cases of the kernels bench, and their targets."""

from __future__ import annotations

from typing import Any

from bench.kernels.cases import OURS
from bench.lib.report import ratio

CEILING = "of the ceiling"
CASES = {
    "cpu": (
        "tree_attention:8192,512,32,8,128:bfloat16",
        "tree_attention:8192,512,32,8,128:float32",
        *(f"tree_attention:1024,{count},9,3,64:bfloat16" for count in (16, 64, 256)),
        "tree_scan:256,32,16,128,128:bfloat16",
        "tree_conv:256,8192,4:bfloat16",
        "kv_compact:80,8,1024,128,12:bfloat16",
        "gumbel_argmax:64,49152:bfloat16",
        "gumbel_argmax:64,49152:float32",
        "topk_children:16,49152,32:float32",
        "gumbel_noise:8,151936:float32",
    ),
    "cuda": (
        "tree_attention:2048,256,64,8,128:bfloat16",
        "tree_attention:8192,512,64,8,128:bfloat16",
        "tree_attention:32768,1024,64,8,128:bfloat16",
        "tree_attention:1024,16,9,3,64:bfloat16",
        "tree_scan:256,32,16,128,128:bfloat16",
        "tree_conv:256,8192,4:bfloat16",
        "kv_compact:80,8,1024,128,12:bfloat16",
        "gumbel_argmax:512,128256:bfloat16",
        "gumbel_argmax:512,128256:float32",
        "topk_children:32,128256,32:bfloat16",
        "topk_children:32,128256,32:float32",
    ),
}


# Minimum speed-up over the fastest other implementation of a kind, and minimum share of the ceiling.
_ATTENTION = {"sdpa": 2.0, "flex": 1.3, CEILING: 0.7}
_ONE_READ = {CEILING: 0.8}
WANTED: dict[str, dict[str, dict[str, float]]] = {
    "cpu": {
        "tree_attention:8192,512,32,8,128:bfloat16": {"sdpa": 1.5},
        "gumbel_noise:8,151936:float32": {"torch": 10.0},
    },
    "cuda": {
        "tree_attention:2048,256,64,8,128:bfloat16": _ATTENTION,
        "tree_attention:8192,512,64,8,128:bfloat16": _ATTENTION,
        "tree_attention:32768,1024,64,8,128:bfloat16": _ATTENTION,
        "gumbel_argmax:512,128256:bfloat16": _ONE_READ,
        "gumbel_argmax:512,128256:float32": _ONE_READ,
    },
}


def speedups(seconds: dict[str, float]) -> dict[str, float]:
    """Return the speed-up over the fastest implementation of each kind (its name up to the first `_`)."""
    best: dict[str, float] = {}
    for name, spent in seconds.items():
        if name != OURS:
            kind = name.partition("_")[0]
            best[kind] = min(spent, best.get(kind, spent))
    return {kind: ratio(spent, seconds[OURS]) for kind, spent in best.items()}


def check_targets(row: dict[str, Any], device: str) -> dict[str, Any]:
    """Return the row with its speed-ups, share of the ceiling, and missed targets in words.

    An implementation that could not run does not miss a target.
    """
    seconds = {name: timing["seconds"] for name, timing in row["ways"].items()}
    speedup = speedups(seconds)
    of_ceiling = ratio(row["ceiling_seconds"], seconds[OURS])
    reached = {**speedup, CEILING: of_ceiling}
    missed = [
        f"{reached[kind]:.2f} {'' if kind == CEILING else 'times '}{kind}, target {wanted}"
        for kind, wanted in WANTED.get(device, {}).get(row["case"], {}).items()
        if reached.get(kind, wanted) < wanted
    ]
    return {**row, "speedup": speedup, "of_ceiling": of_ceiling, "missed": missed}
