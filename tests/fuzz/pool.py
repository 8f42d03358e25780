"""Cases tried in child processes, which are watched: none may hang, abort, or take too much memory."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

_SECONDS = 10.0  # of computing, or asleep, that a case may take
_LATEST = 60.0  # seconds of the clock, which runs on while others have the cores
_STARTS = 240.0
_LOOK = 0.2  # seconds between two looks at a process
_ENDS = ("read", "refused", "failed")
_LINES = 25  # of a failure that are told


@dataclass(slots=True)
class Report:
    """How many cases ended in which way, by surface and end, and what failed."""

    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        surfaces = sorted({surface for surface, _ in self.ends})
        lines = [
            f"{surface:20}" + "".join(f"{self.ends[surface, end]:>6} {end}" for end in _ENDS)
            for surface in surfaces
        ]
        return "\n".join([*lines, f"{self.ends.total()} cases, {len(self.failures)} failures"])


class Child:
    """One process, and what it is asked."""

    def __init__(self, bases: Path, seed: int) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        command = [sys.executable, "-m", "tests.fuzz.child", str(bases), str(seed)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment |= {"HF_HUB_OFFLINE": "1", "OFFSPEC_CACHE": str(bases / "cache")}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment
        )
        if self._line(_STARTS, _STARTS) != "ready\n":
            said = self._said()
            self.close()
            raise RuntimeError(f"the files as they were made cannot be read:\n{said}")

    def try_case(self, number: int) -> dict[str, str]:
        """What became of it. `alive` tells whether the process can be asked again."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n".encode())
        self._process.stdin.flush()
        line = self._line(_SECONDS, _LATEST)
        if line:
            found: dict[str, str] = json.loads(line)
            return found
        ended = self._process.poll()
        why = "hangs" if ended is None else f"ended the process ({ended}): {self._said()}"
        self.close()
        return {"surface": "", "end": "failed", "why": why}

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def _line(self, seconds: float, latest: float) -> str:
        """The next line; nothing where the process has ended, or takes too long."""
        assert self._process.stdout is not None
        waited, computed = 0.0, self._computed()
        while waited < latest and self._computed() - computed < seconds:
            before = time.monotonic()
            if select.select([self._process.stdout], [], [], _LOOK)[0]:
                return self._process.stdout.readline().decode()
            waited += min(
                time.monotonic() - before, 2 * _LOOK
            )  # both processes may have been stopped meanwhile
        return ""

    def _computed(self) -> float:
        """Seconds of computing so far."""
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _said(self) -> str:
        self._errors.seek(0)
        return "\n".join(self._errors.read().decode(errors="replace").splitlines()[-_LINES:])

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()


def run(
    cases: Iterable[int], seed: int, bases: Path, tell: Callable[[int, dict[str, str]], None] | None = None
) -> Report:
    """Try these cases. tell: takes the number of each, and what became of it."""
    from tests.fuzz.surfaces import SURFACES

    names, report, child = list(SURFACES), Report(), None
    try:
        for number in cases:
            if child is None or not child.alive:
                child = Child(bases, seed)
            found = child.try_case(number) | {"surface": names[number % len(names)]}
            report.ends[found["surface"], found["end"]] += 1
            if found["end"] == "failed":
                why = "\n".join(found["why"].splitlines()[-_LINES:])
                report.failures.append(f"case {number} ({found['surface']}): {why}")
            if tell is not None:
                tell(number, found)
    finally:
        if child is not None:
            child.close()
    return report
