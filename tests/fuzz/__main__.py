"""As many cases as are wanted, by hand.

python -m tests.fuzz 20000 --first 300 --seed 1
python -m tests.fuzz --only config --cases 500
python -m tests.fuzz --case 1234            # what became of one, with its traceback
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.fuzz.pool import run
from tests.fuzz.surfaces import SURFACES, write_bases


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("cases", type=int, nargs="?", default=300)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(SURFACES), help="cases of this surface alone")
    parser.add_argument("--case", type=int, help="this case alone")
    wanted = parser.parse_args()
    numbers = range(wanted.first, wanted.first + wanted.cases)
    if wanted.case is not None:
        numbers = range(wanted.case, wanted.case + 1)
    if wanted.only:
        place = list(SURFACES).index(wanted.only)
        numbers = range(place + wanted.first * len(SURFACES), 10**9, len(SURFACES))[: wanted.cases]

    def tell(number: int, found: dict[str, str]) -> None:
        if number % 50 == 0:
            print(f"\rcase {number}", end="", file=sys.stderr, flush=True)
        if wanted.case is not None or found["end"] == "failed":
            print(f"case {number} ({found['surface']}): {found['end']} {found['why']}\n", flush=True)

    with tempfile.TemporaryDirectory(prefix="offspec-fuzz-bases-") as folder:
        write_bases(Path(folder))
        report = run(numbers, wanted.seed, Path(folder), tell)
    print(report)
    return bool(report.failures)


if __name__ == "__main__":
    raise SystemExit(main())
