"""What a pass costs the processor: unpacking every layer once, and the products of a few rows.

    python -m bench.quantised.floor PACK MODEL --rows 2 64

A program of its own, so that its weights are not in the memory of what is measured. The packed bytes of all
layers lie in RAM, and go one after the other through scratch that they share, as in a pass. The products are
those of `stream_floor.py`, on random layers of MODEL's shape.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.lib.cgroup import BenchError
from bench.lib.command import printed, shared
from bench.lib.quantised_draft import from_disk

if TYPE_CHECKING:
    import torch


_LAYER = re.compile(r"\.layers\.\d+\.")
_LEAST_SECONDS = 1.0


class Unpacking:
    """All packed weights of a model's layers, in memory, and scratch for the largest."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        import torch

        from offspec.checkpoint import open_checkpoint
        from offspec.checkpoint.tensors import PackedInfo
        from offspec.model.unpacking import Scratch

        weights = open_checkpoint(str(folder)).tensors.items()
        found = [weight for name, weight in weights if _LAYER.search(name) and isinstance(weight, PackedInfo)]
        if not found:
            raise BenchError(f"{folder.name} has no packed weights: name a pack")
        self._weights = [(w, {name: from_disk(part) for name, part in w.parts}) for w in found]
        most = max(math.prod(weight.shape) for weight in found)
        self._scratch = Scratch(most, dtype, torch.device("cpu")).take(most)
        self.nbytes = sum(weight.nbytes for weight in found)

    def seconds(self, rows: int = 0) -> float:
        """Of one pass, the mean over a second or more.

        rows: how many each weight is multiplied with once it is unpacked, while it still is in the cache.
        """
        import torch

        widths = {weight.shape[-1] for weight, _ in self._weights}
        inputs = {width: torch.randn(rows, width).to(self._scratch.dtype) for width in widths}
        self._all_once(inputs if rows else {})
        done, start = 0, time.perf_counter()
        while (spent := time.perf_counter() - start) < _LEAST_SECONDS or not done:
            self._all_once(inputs if rows else {})
            done += 1
        return spent / done

    def _all_once(self, inputs: Mapping[int, torch.Tensor]) -> None:
        import torch

        from offspec_kernels.dequant import dequantise

        for weight, parts in self._weights:
            out = self._scratch[: math.prod(weight.shape)]
            values = dequantise(weight.format, parts, weight.shape, out)
            if inputs:
                torch.nn.functional.linear(inputs[weight.shape[-1]], values)


def measure(pack: Path, model: Path, rows: list[int], dtype: str) -> dict[str, Any]:
    """Seconds of a pass: unpacking alone, and by rows what `stream_floor.Compute` has, and unpacking and
    products together."""
    import torch

    from bench.stream.floor import Floor

    kind = getattr(torch, dtype)
    unpacking = Unpacking(pack, kind)
    floor = Floor(model, kind, torch.device("cpu"))
    return {
        "unpacking_seconds": unpacking.seconds(),
        "unpacked_bytes": unpacking.nbytes,
        "by_rows": {
            str(count): {**floor.measure(count).to_json(), "together_seconds": unpacking.seconds(count)}
            for count in rows
        },
    }


def main() -> int:
    """Print the floors as one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.quantised.floor", description=main.__doc__)
    parser.add_argument("pack", type=Path)
    parser.add_argument("model", type=Path, help="the same model in bfloat16, for its shape")
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 64])
    shared(parser, "dtype")
    args = parser.parse_args()
    return printed(lambda: json.dumps(measure(args.pack, args.model, args.rows, args.dtype)))


if __name__ == "__main__":
    sys.exit(main())
