"""Cases, each tried in a process of its own, and a report of how they ended."""

import faulthandler
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random

from offspec.core.errors import OffspecError
from tests.fuzz.mutate import mutate
from tests.fuzz.surfaces import SURFACES, Surface

ROOM = 2 << 30  # bytes of addresses that a case may take beside what the process has when it begins
# Seconds that a case may take, of computing and of the clock, which runs on while others have the cores.
LIMITS = {signal.ITIMER_PROF: 10.0, signal.ITIMER_REAL: 300.0}
ENDS = ("read", "refused", "failed")
LINES = 25  # of a failure that are told


class Report:
    """How many cases of a seed ended in which way, and which failed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.ends = Counter[tuple[str, str]]()
        self.failed = list[int]()

    def __str__(self) -> str:
        """A table of all surfaces, and a last line."""
        table = [
            f"{surface:20}" + "".join(f"{self.ends[surface, end]:>6} {end}" for end in ENDS)
            for surface in sorted({surface for surface, _ in self.ends})
        ]
        last = f"{self.ends.total()} cases of seed {self.seed}, {len(self.failed)} failures"
        if self.failed:
            last += f"; for the first: python -m tests.fuzz --seed {self.seed} --case {self.failed[0]}"
        return "\n".join([*table, last])


def run(cases: Iterable[int], seed: int, bases: Path, tell: Callable[[int, str, str, str], None]) -> Report:
    """Try these cases, until Ctrl-C. tell: takes number, surface, end and reason of each."""
    warnings.simplefilter("ignore")
    report, names = Report(seed), list(SURFACES)
    for surface in SURFACES.values():  # what is whole is read, and everything is imported
        surface.use(bases / surface.base)
    try:
        for number in cases:
            name = names[number % len(names)]
            end, why = _in_a_process(number, seed, SURFACES[name], bases)
            report.ends[name, end] += 1
            report.failed += [number] if end == "failed" else []
            tell(number, name, end, why)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    return report


def _in_a_process(number: int, seed: int, surface: Surface, bases: Path) -> tuple[str, str]:
    """End and reason of a case, in a copy of this process that ends where the case hangs or aborts."""
    with tempfile.TemporaryDirectory(prefix="offspec-fuzz-") as folder:
        room, answer, said = Path(folder), Path(folder, "answer"), Path(folder, "said")
        process = os.fork()
        if not process:
            try:
                _limit(said)
                answer.write_text(json.dumps(_outcome(number, seed, surface, bases, room)))
            finally:
                os._exit(1)
        status = os.waitpid(process, 0)[1]
        if answer.exists():
            end, why = json.loads(answer.read_text())
            return end, why
        hangs = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM)
        why = "hangs" if hangs else f"ended the process ({status})"
        last = said.read_text(errors="replace").splitlines()[-LINES:]
        return "failed", "\n".join([why, *last])


def _limit(said: Path) -> None:
    """Limit this process in memory and time, and have all that it prints in a file."""
    out = os.open(said, os.O_CREAT | os.O_WRONLY)
    os.dup2(out, 1)
    os.dup2(out, 2)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))
    for timer, ends in zip(LIMITS, (signal.SIGPROF, signal.SIGALRM), strict=True):
        faulthandler.register(ends, file=2, chain=True)
        signal.setitimer(timer, LIMITS[timer])


def _outcome(number: int, seed: int, surface: Surface, bases: Path, room: Path) -> tuple[str, str]:
    """Change one file of a copy of a surface, and read it: an answer, an error of offspec, or a failure."""
    random = Random(f"{seed} {number}")
    source, copy = bases / surface.base, room / surface.base
    if source.is_dir():
        shutil.copytree(source, copy)
    else:
        shutil.copyfile(source, copy)
    file = copy / random.choice(surface.files) if source.is_dir() else copy
    file.write_bytes(mutate(random, file))
    surface.mend(copy)
    os.environ["OFFSPEC_CACHE"] = str(room / "cache")
    try:
        surface.use(copy)
    except OffspecError as error:
        if "\n" in str(error):
            return "failed", f"not one line: {error!r}"
        return "refused", str(error)[:300]
    except BaseException as error:  # a panic of Rust is no Exception
        trace = traceback.format_exc().splitlines()[-LINES:]
        return "failed", "\n".join([repr(error), *trace])
    return "read", ""
