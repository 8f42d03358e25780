"""Read files of every kind that an accident or a stranger has changed, and report what fails.

Each case copies a whole model, pack, session or other file, changes one file of it, and reads it in a
process of its own. It must end in an answer or in an error of one line: without a traceback, a hang, an
abort, or gigabytes of memory. A case is known by its number and the seed, and is the same each time.

examples:
  python -m tests.fuzz                              300 cases, in two minutes or so
  python -m tests.fuzz 20000 --first 300 --seed 1   others, and more of them
  python -m tests.fuzz 500 --only config            of one kind of file
  python -m tests.fuzz --case 1234 --seed 1         one case, with its traceback or its error
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

# Before anything imports torch: processes are copied, which threads would not survive.
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

from tests.fuzz.cases import run
from tests.fuzz.surfaces import SURFACES, write_bases


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", type=int, nargs="?", default=300, help="number of cases (300)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first case (0)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all changes (0)")
    kinds = ", ".join(SURFACES)
    parser.add_argument("--only", choices=list(SURFACES), metavar="KIND", help=f"one kind of file: {kinds}")
    parser.add_argument(
        "--case", type=int, metavar="N", help="only the case of this number, with its outcome"
    )
    wanted = parser.parse_args()
    numbers = range(wanted.first, wanted.first + wanted.cases)
    if wanted.case is not None:
        numbers = range(wanted.case, wanted.case + 1)
    elif wanted.only:
        place = list(SURFACES).index(wanted.only)
        numbers = range(place + wanted.first * len(SURFACES), sys.maxsize, len(SURFACES))[: wanted.cases]

    def tell(number: int, surface: str, end: str, why: str) -> None:
        if number % 50 == 0:
            print(f"\rcase {number}", end="", file=sys.stderr, flush=True)
        if wanted.case is not None or end == "failed":
            print(f"case {number} ({surface}): {end} {why}\n", flush=True)

    with tempfile.TemporaryDirectory(prefix="offspec-fuzz-bases-") as folder:
        os.environ["OFFSPEC_CACHE"] = os.path.join(folder, "cache")
        write_bases(Path(folder))
        report = run(numbers, wanted.seed, Path(folder), tell)
    print(report)
    return bool(report.failed)


if __name__ == "__main__":
    raise SystemExit(main())
