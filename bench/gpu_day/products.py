"""Products of a 70B layer by number of rows: NF4 dequantization, then `row_linear` or a library product."""

from __future__ import annotations

from functools import partial
from typing import Any

from bench.gpu_day.step_context import StepContext

# (N, K) of a layer's matrices, and the number of matrices of that shape.
LAYER = {
    "q, o": (8192, 8192, 2),
    "k, v": (1024, 8192, 2),
    "gate, up": (28672, 8192, 2),
    "down": (8192, 28672, 1),
}
ROWS = (1, 16, 64, 128, 256, 512, 1024)


def measure(context: StepContext) -> None:
    import torch

    from bench.kernels.timing import clock_of, measure_rates

    clock, found = clock_of(context.device), context.found
    if not context.dry:
        found["ceiling"] = measure_rates(context.device, ["bfloat16"]).to_json()
        context.save()
    found["shapes"] = {}
    for name, (width, columns, _) in ({"toy": (128, 128, 1)} if context.dry else LAYER).items():
        found["shapes"][name] = _matrix(context, (width, columns), clock)
        torch.cuda.empty_cache()
        context.save()
    if not context.dry:
        found["layer"] = _layer(found["shapes"])
        found["short"] = "dequant + row_linear of a layer, ms: " + ", ".join(
            f"{rows}: {1e3 * (of['dequant'] + of['row_linear']):.2f}" for rows, of in found["layer"].items()
        )


def _matrix(context: StepContext, shape: tuple[int, int], clock: Any) -> dict[str, Any]:
    """Return times of dequantizing an NF4 weight on the device, and of products with its bfloat16 values."""
    import torch
    import torch.nn.functional as F

    from bench.kernels.dequant import random_parts
    from offspec_kernels.dequant import dequantize
    from offspec_kernels.dequant.codebook import Codebook
    from offspec_kernels.dequant.codebook.tables import TABLES
    from offspec_kernels.row_linear import row_linear

    format, seconds = Codebook("nf4", 64), 0.004 if context.dry else 0.02
    parts = random_parts(format, shape, context.device)
    parts["table"] = torch.tensor(TABLES["nf4"], dtype=torch.float32, device=context.device)
    out = torch.empty(shape[0] * shape[1], dtype=torch.bfloat16, device=context.device)
    unpack = partial(dequantize, format, parts, shape, out, path="triton")
    weight = unpack()
    found: dict[str, Any] = {"dequant": _timed({"": unpack}, clock, seconds)[""], "rows": {}}
    for count in (4,) if context.dry else ROWS:
        rows = torch.randn(count, shape[1], device=context.device).to(torch.bfloat16)
        ways = {
            "row_linear": partial(row_linear, rows, weight, path="triton"),
            "library": partial(F.linear, rows, weight),
        }
        found["rows"][count] = _timed(ways, clock, seconds)
    return found


def _timed(ways: dict[str, Any], clock: Any, seconds: float) -> dict[str, dict[str, Any]]:
    from bench.kernels.timing import time_in_turns

    return {name: timing.to_json() for name, timing in time_in_turns(ways, clock, seconds).items()}


def _layer(shapes: dict[str, Any]) -> dict[int, dict[str, float]]:
    """Return the seconds of all matrices of a layer, by rows and way."""
    found = {}
    for rows in ROWS:
        found[rows] = {
            way: sum(LAYER[name][2] * of["rows"][rows][way]["seconds"] for name, of in shapes.items())
            for way in ("row_linear", "library")
        }
        found[rows]["dequant"] = sum(LAYER[name][2] * of["dequant"]["seconds"] for name, of in shapes.items())
    return found
