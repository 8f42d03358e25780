"""Alternative tiles for `row_linear`: their speed, and whether a row has the bits of the current tile.

Tiles with the same bits may be chosen by the number of rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from bench.gpu_day.step_context import StepContext

# (N, K) of a 70B layer's matrices.
_SHAPES = {"k": (1024, 8192), "q": (8192, 8192), "up": (28672, 8192), "down": (8192, 28672)}
_ROWS = (1, 64, 128, 256, 512, 1024)
_OWN = (64, 64, 64, 4, 3)
# (rows, width, columns) of a tile, warps, stages
_TILES = (
    _OWN, (64, 64, 64, 4, 5), (64, 64, 128, 4, 3), (64, 32, 128, 4, 4), (64, 16, 128, 4, 5),
    (64, 128, 64, 4, 4), (128, 64, 64, 4, 4), (128, 128, 64, 4, 3), (128, 128, 64, 8, 4),
    (128, 256, 64, 8, 3), (16, 64, 128, 4, 4),
)  # fmt: skip


def measure(context: StepContext) -> None:
    import torch

    from bench.kernels.timing import clock_of, time_in_turns

    clock, found = clock_of(context.device), context.found
    for name, (width, columns) in ({"toy": (96, 96)} if context.dry else _SHAPES).items():
        weight = (torch.randn(width, columns, device=context.device) * columns**-0.5).bfloat16()
        found[name] = {}
        for count in (3,) if context.dry else _ROWS:
            rows = torch.randn(count, columns, device=context.device).bfloat16()
            wanted, row = _multiply(rows, weight, _OWN), {}
            for tile in _TILES[:2] if context.dry else _TILES:
                row["x".join(map(str, tile))] = made = dict[str, Any]()
                try:
                    made["same_bits"] = torch.equal(_multiply(rows, weight, tile), wanted)
                    call = partial(_multiply, rows, weight, tile)
                    made["seconds"] = time_in_turns({"": call}, clock, 0.001)[""].seconds
                except Exception as error:  # a tile too large for the device
                    made["error"] = f"{type(error).__name__}: {error}"[:200]
            found[name][count] = row
        context.save()
    found["short"] = {
        name: {count: _best(row) for count, row in rows.items()} for name, rows in found.items()
    }


def _multiply(rows: Any, weight: Any, tile: tuple[int, int, int, int, int]) -> Any:
    import torch
    import triton

    from offspec_kernels.backend import is_interpreted
    from offspec_kernels.row_linear.triton import _row_linear

    high, wide, deep, warps, stages = tile
    count, (width, columns) = len(rows), weight.shape
    out = torch.empty((count, width), dtype=rows.dtype, device=rows.device)
    kernel: Any = _row_linear[(triton.cdiv(width, wide) * triton.cdiv(count, high),)]
    kernel(
        rows, weight, out, out, count, width, columns, rows.stride(0), weight.stride(0), weight.stride(1),
        BIASED=False, ROWS=high, WIDTH=wide, COLUMNS=deep, INTERPRETED=is_interpreted(),
        num_warps=warps, num_stages=stages, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def _best(row: dict[str, Any]) -> str:
    """Return the fastest tile with the same bits, and its microseconds relative to the current tile's."""
    same = {
        tile: made["seconds"] for tile, made in row.items() if made.get("same_bits") and "seconds" in made
    }
    best = min(same, key=same.__getitem__)
    return f"{best} {1e6 * same[best]:.0f} of {1e6 * same['x'.join(map(str, _OWN))]:.0f} us"
