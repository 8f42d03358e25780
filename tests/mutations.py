"""Whether the tests find faults: each is put into a copy of the program, and tests run until one fails.

python -m tests.mutations               all of them
python -m tests.mutations stream core   those in files whose paths have these words
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

_LIST = Path(__file__).with_suffix(".toml")
_SECONDS = 1200  # after which tests hang, which counts as found


@dataclass(frozen=True, slots=True)
class Mutation:
    """One line made wrong.

    Args:
        file: Path from the root of the repository.
        old: Text that stands once in it.
        new: What takes its place.
        tests: Files and folders, of which at least one test must fail.
    """

    file: str
    old: str
    new: str
    tests: str


def main() -> int:
    """Print a line for each fault; the exit code is 1 where one was not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="parts of paths: only faults in such files")
    parser.add_argument(
        "--root", type=Path, default=Path.cwd(), help="the checkout to copy, by default this one"
    )
    given = parser.parse_args()
    listed = [Mutation(**each) for each in tomllib.loads(_LIST.read_text())["mutation"]]
    chosen = [each for each in listed if not given.words or any(word in each.file for word in given.words)]
    with tempfile.TemporaryDirectory() as folder:
        copy = _copy(given.root, Path(folder) / "copy")
        missed = sum(not _finds(copy, mutation, number) for number, mutation in enumerate(chosen, 1))
    print(f"{len(chosen) - missed} of {len(chosen)} found")
    return int(missed > 0)


def _copy(root: Path, to: Path) -> Path:
    """The files that git knows, as they are in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, to / name)
    return to


def _finds(copy: Path, mutation: Mutation, number: int) -> bool:
    """Whether a test fails, which is printed with the time that it took."""
    path = copy / mutation.file
    right, began = path.read_text(), time.perf_counter()
    if right.count(mutation.old) != 1:
        print(
            f"{number:2} stale: {mutation.file} has {mutation.old!r} {right.count(mutation.old)} times",
            flush=True,
        )
        return False
    path.write_text(right.replace(mutation.old, mutation.new))
    try:
        code, test = _run(copy, mutation.tests.split())
    finally:
        path.write_text(right)
    found = code not in (0, 4, 5)  # 4 and 5: no such file, and no test
    said = "found" if found else "MISSED"
    change = f"{mutation.file}: {mutation.old} -> {mutation.new}"
    print(f"{number:2} {said:6} {time.perf_counter() - began:4.0f} s  {change}  {test}", flush=True)
    return found


def _run(copy: Path, tests: list[str]) -> tuple[int, str]:
    """The exit code of pytest, and the first test that failed."""
    present = [test for test in tests if (copy / test).exists()]
    paths = os.pathsep.join(str(copy / folder) for folder in ("", "kernels", "planners"))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", *present]
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return 1, "hung"
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return done.returncode, failed[0] if failed else ""


if __name__ == "__main__":
    sys.exit(main())
