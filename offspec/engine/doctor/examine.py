"""All checks, one after the other, each in a process that may fail with it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from offspec.engine.doctor.finding import Asked, Begun, Finding

_WORKER = "offspec.engine.doctor.worker"


@dataclass(frozen=True, slots=True)
class Check:
    """key: one word; title: what it looks at; place: of its function, as "module:name"."""

    key: str
    title: str
    place: str


CHECKS = tuple(
    Check(key, title, f"offspec.engine.doctor.{key}:check")
    for key, title in {
        "software": "software",
        "driver": "NVIDIA driver",
        "torch_build": "torch",
        "device": "device",
        "memory": "memory",
        "disk": "disks",
        "numba_loops": "numba",
        "small_products": "small products",
        "triton_kernels": "Triton",
        "pinning": "pinned memory",
        "sample_run": "sample run",
    }.items()
)


def examine(asked: Asked, checks: Sequence[Check] = CHECKS) -> Generator[Begun | Finding, None, None]:
    """Run checks in order, and tell what each finds as it finds it.

    They share a process. One that takes it down is reported as failed, and those behind it run in another.
    Closing the iterator ends the process.
    """
    left = list(checks)
    while left:
        with _worker(left, asked) as worker:
            for line in worker.lines():
                if "begun" in line:
                    yield Begun(left[0].title)
                elif "finding" in line:
                    yield Finding(**line["finding"])
                else:
                    left.pop(0)
            if left:
                yield Finding(left[0].title, "failed", worker.why_it_ended(), _remedy(worker))
                left.pop(0)


class _Worker:
    """A running process, the pipe that it writes to, and the file that takes what it writes to stderr."""

    def __init__(self, process: "subprocess.Popen[bytes]", pipe: int, stderr: Any) -> None:
        self.process, self._pipe, self._stderr = process, pipe, stderr

    def lines(self) -> Iterator[dict[str, Any]]:
        """What it tells, until it ends."""
        with os.fdopen(self._pipe, encoding="utf-8") as told:
            for line in told:
                if line.endswith("\n"):  # else it ended in the middle of it
                    yield json.loads(line)
        self.process.wait()

    @property
    def killed_by(self) -> signal.Signals | None:
        code = self.process.returncode
        return signal.Signals(-code) if code < 0 else None

    def why_it_ended(self) -> str:
        """One line: the signal or the exit code, and the last line that it left on stderr."""
        how = f"was ended by {self.killed_by.name}" if self.killed_by else "ended"
        self._stderr.seek(0)
        last = self._stderr.read()[-10_000:].decode(errors="replace").strip().splitlines()[-1:]
        return ": ".join([f"the process that tried it {how}", *(" ".join(line.split()) for line in last)])


def _remedy(worker: _Worker) -> str:
    if worker.killed_by is signal.SIGKILL:
        return "the system kills what takes too much memory: close other programs, or raise the memory limit"
    return "please report it with the output of `offspec doctor --json`"


@contextmanager
def _worker(checks: Sequence[Check], asked: Asked) -> Iterator[_Worker]:
    """A process that runs these checks. It hears no Ctrl-C, and is killed where the block ends early."""
    job = {
        "checks": [[check.key, check.title, check.place] for check in checks],
        "folders": [str(folder.absolute()) for folder in asked.folders],
    }
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as stderr:
        try:
            process = subprocess.Popen(
                # -P and PYTHONPATH: modules are looked for where this process does, and not in its folder.
                [sys.executable, "-P", "-m", _WORKER, str(writing), json.dumps(job)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=[writing],
                start_new_session=True,
            )
        finally:
            os.close(writing)
        try:
            yield _Worker(process, reading, stderr)
        finally:
            process.kill()
            process.wait()
