"""How fast the processor multiplies: GFLOP/s of a matrix that is not in its cache, by rows.

python -m bench.lib.gemm_rates [--tokens 1 16 64] [--rows 6144 --columns 2304]
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from bench.lib.command import printed, shared
from offspec_planners.measure import gemm_rates


def main() -> int:
    """Print GEMM rates as JSON: run as a program so that the caller need not load torch itself."""
    parser = argparse.ArgumentParser(prog="python -m bench.lib.gemm_rates", description=main.__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 256, 512])
    parser.add_argument("--rows", type=int, default=6144)
    parser.add_argument("--columns", type=int, default=2304)
    shared(parser, "dtype")
    args = vars(parser.parse_args())
    return printed(lambda: json.dumps([asdict(rate) for rate in gemm_rates(args.pop("tokens"), **args)]))


if __name__ == "__main__":
    sys.exit(main())
