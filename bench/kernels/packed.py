"""Time of a pass's quantized matrix products, relative to the larger of link and bfloat16 products.

    python -m bench.kernels.packed [--formats nf4 Q4_K] [--tokens 1 64 256 512]

Random layers of the widened model's shapes are used, each in its own memory, so that packed bytes come from
RAM. The ceiling is the larger of the link's time for those bytes and the time of torch's bfloat16 products
with ready values. `whole` dequantizes a matrix and multiplies it with torch's product; its rows' bits may
depend on their number. Before anything is timed, a row alone is checked to have the same bits as among
others.
"""

from __future__ import annotations

import argparse
import math
import sys
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.dequant import FORMATS, packed_bytes, random_parts
from bench.kernels.timing import time_in_turns, wall_clock
from bench.lib.cgroup import BenchError
from bench.lib.command import Command
from bench.lib.report import Report
from offspec.core.values import parse_bytes
from offspec.stream.arena import Arena
from offspec_kernels.dequant import dequantize
from offspec_kernels.packed_linear import packed_linear
from offspec_planners.units import format_bytes


def options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--formats", nargs="+", choices=FORMATS, metavar="FORMAT", default=["nf4", "Q4_K"])
    p.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 256, 512], help="rows per pass")
    p.add_argument("--hidden", type=int, default=2304)
    p.add_argument("--inner", type=int, default=6144)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--link", default="1.3GB", help="bytes per second of the disk (default 1.3GB)")
    p.add_argument("--seconds", type=float, default=0.2, help="seconds of each of five turns (default 0.2)")


class Layers:
    """Weights of some layers in one packed format, and values of one layer for torch's product."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        hidden, inner, keys = args.hidden, args.inner, args.hidden // 3
        shapes = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden),
                  (inner, hidden), (inner, hidden), (hidden, inner)]  # fmt: skip
        self._format, self._layers, cpu = FORMATS[name], args.layers, torch.device("cpu")
        self._parts = [
            (shape, random_parts(self._format, shape, cpu)) for _ in range(args.layers) for shape in shapes
        ]
        self._values = [torch.randn(shape).bfloat16() for shape in shapes]
        self._scratch = Arena(2 * max(map(math.prod, shapes))).tensor.view(torch.bfloat16)
        self.nbytes = sum(packed_bytes(parts) for _, parts in self._parts)

    def inputs(self, rows: int) -> dict[int, Tensor]:
        widths = {values.shape[1] for values in self._values}
        return {width: torch.randn(rows, width).bfloat16() for width in widths}

    def products(self, inputs: dict[int, Tensor]) -> None:
        for _ in range(self._layers):
            for values in self._values:
                F.linear(inputs[values.shape[1]], values)

    def whole(self, inputs: dict[int, Tensor]) -> list[Tensor]:
        return [self._whole(inputs[shape[1]], shape, parts) for shape, parts in self._parts]

    def _whole(self, rows: Tensor, shape: tuple[int, int], parts: dict[str, Tensor]) -> Tensor:
        values = dequantize(self._format, parts, shape, self._scratch[: math.prod(shape)])
        return F.linear(F.pad(rows, (0, 0, 0, 1)), values)[:-1] if len(rows) == 1 else F.linear(rows, values)

    def packed(self, inputs: dict[int, Tensor]) -> list[Tensor]:
        """Compute the products as a pass does: in panels, or else whole."""
        made = list[Tensor]()
        for shape, parts in self._parts:
            out = packed_linear(inputs[shape[1]], self._format, parts, shape)
            made.append(self._whole(inputs[shape[1]], shape, parts) if out is None else out)
        return made

    def check(self, rows: int) -> None:
        """Raise BenchError unless the first row alone has the same bits as among others."""
        inputs = self.inputs(rows)
        many = self.packed(inputs)
        alone = self.packed({width: given[:1] for width, given in inputs.items()})
        if not all(torch.equal(one[0], all_[0]) for one, all_ in zip(alone, many, strict=True)):
            raise BenchError("a row has other bits alone than among others, so nothing was timed")


def measure(name: str, args: argparse.Namespace, report: Report) -> list[dict[str, Any]]:
    """Return a row for each number of tokens."""
    layers, found = Layers(name, args), list[dict[str, Any]]()
    layers.check(max(args.tokens))
    link = layers.nbytes / parse_bytes(args.link)
    for rows in args.tokens:
        given = layers.inputs(rows)
        ways = {way: partial(getattr(layers, way), given) for way in ("products", "whole", "packed")}
        timing = time_in_turns(ways, wall_clock, args.seconds)
        products, whole, packed = (timing[way].seconds for way in ways)
        bound = max(link, products)
        report.ceiling(
            f"{name}, {rows} rows: {bound:.4f} s, the larger of link {link:.4f} s"
            f" ({format_bytes(layers.nbytes)}) and products {products:.4f} s"
        )
        report.reached(f"{packed:.4f} s", packed / bound)
        times = {way: one.to_json() for way, one in timing.items()}
        shares = {"ratio": packed / bound, "of_whole": packed / whole}
        found.append({"format": name, "rows": rows, "link_seconds": link, **times, **shares})
    return found


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Check, time and report every format."""
    runs = [run for name in args.formats for run in measure(name, args, report)]
    rows = []
    for run in runs:
        bound = max(run["link_seconds"], run["products"]["seconds"])
        seconds = (bound, run["whole"]["seconds"], run["packed"]["seconds"])
        cells = [*(f"{one:.4f}" for one in seconds), f"{run['ratio']:.2f}", f"{run['of_whole']:.2f}"]
        rows.append([run["format"], str(run["rows"]), *cells])
    heads = ("", "rows", "bound", "whole", "packed", "ratio", "of whole")
    report.table("quantized products of a pass, seconds", heads, rows)
    known = report.head(args, "hidden", "inner", "layers", "link")
    summary = {**known, "threads": torch.get_num_threads(), "runs": runs}
    report.record(summary)
    return summary


main = Command("packed", "Quantized products of a pass.", options, bench, module="kernels.packed")

if __name__ == "__main__":
    sys.exit(main())
