"""The two ceilings of a pass: how fast the disk gives bytes, and how fast the processor multiplies."""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from dataclasses import asdict

from offspec_planners.measure import Bandwidth, GemmRate, gemm_rates, read_bandwidth

__all__ = ["Bandwidth", "GemmRate", "gemm_rates", "read_bandwidth"]


def main() -> None:
    """Print GEMM rates as JSON: run as a program so that the caller need not load torch itself."""
    parser = argparse.ArgumentParser(prog="python -m bench.lib.bandwidth", description=main.__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 256, 512])
    parser.add_argument("--rows", type=int, default=6144)
    parser.add_argument("--columns", type=int, default=2304)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args()
    rates = gemm_rates(args.tokens, rows=args.rows, columns=args.columns, dtype=args.dtype)
    print(json.dumps([asdict(rate) for rate in rates]))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
