"""Runner of the checks: one after the other, in a worker process that may crash."""

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

from offspec.engine.doctor.finding import CheckStarted, DoctorOptions, Finding

_WORKER = "offspec.engine.doctor.worker"


@dataclass(frozen=True, slots=True)
class Check:
    """A check: a one-word key, a title for display, and its function as "module:name"."""

    key: str
    title: str
    entry_point: str


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


def run_checks(
    options: DoctorOptions, checks: Sequence[Check] = CHECKS
) -> Generator[CheckStarted | Finding, None, None]:
    """Run checks in order and yield their findings as they arrive.

    Checks share a worker process. A check that crashes it is reported as failed, and the remaining checks run
    in a new process. Closing the iterator ends the process.
    """
    left = list(checks)
    while left:
        with _worker(left, options) as worker:
            for line in worker.lines():
                if "begun" in line:
                    yield CheckStarted(left[0].title)
                elif "finding" in line:
                    yield Finding(**line["finding"])
                else:
                    left.pop(0)
            if left:
                yield Finding(left[0].title, "failed", worker.exit_reason(), _remedy(worker))
                left.pop(0)


class _Worker:
    """A worker process, the pipe with its messages, and the file with its stderr output."""

    def __init__(self, process: "subprocess.Popen[bytes]", pipe: int, stderr: Any) -> None:
        self.process, self._pipe, self._stderr = process, pipe, stderr

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield its messages until it ends."""
        with os.fdopen(self._pipe, encoding="utf-8") as messages:
            for line in messages:
                if line.endswith("\n"):  # otherwise the process ended within a line
                    yield json.loads(line)
        self.process.wait()

    @property
    def killed_by(self) -> signal.Signals | None:
        code = self.process.returncode
        return signal.Signals(-code) if code < 0 else None

    def exit_reason(self) -> str:
        """Return one line: how the process ended, and its last line on stderr."""
        how = f"was killed by {self.killed_by.name}" if self.killed_by else "exited"
        self._stderr.seek(0)
        last = self._stderr.read()[-10_000:].decode(errors="replace").strip().splitlines()[-1:]
        return ": ".join([f"the process of this check {how}", *(" ".join(line.split()) for line in last)])


def _remedy(worker: _Worker) -> str:
    if worker.killed_by is signal.SIGKILL:
        return "probably out of memory: close other programs, or raise the memory limit"
    return "please report this with the output of `offspec doctor --json`"


@contextmanager
def _worker(checks: Sequence[Check], options: DoctorOptions) -> Iterator[_Worker]:
    """Start a process that runs these checks. It ignores Ctrl-C and is killed at the end of the block."""
    job = {
        "checks": [[check.key, check.title, check.entry_point] for check in checks],
        "folders": [str(folder.absolute()) for folder in options.folders],
    }
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as stderr:
        try:
            process = subprocess.Popen(
                # -P and PYTHONPATH: use this process's module search path, without the working directory.
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
