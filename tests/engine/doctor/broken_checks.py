"""Checks that fail in all ways in which a process can."""

import os
import signal
import sys
import time
from collections.abc import Iterator

from offspec.engine.doctor.finding import DoctorOptions, Finding


def well(asked: DoctorOptions) -> Iterator[Finding]:
    print("this goes nowhere")
    yield Finding("well", "ok", f"{len(asked.folders)} folders", figures={"pid": os.getpid()})


def raising(asked: DoctorOptions) -> Iterator[Finding]:
    yield Finding("first half", "ok", "done")
    raise RuntimeError("CUDA error: an illegal memory access\nCompile with TORCH_USE_CUDA_DSA")


def crashing(asked: DoctorOptions) -> Iterator[Finding]:
    yield Finding("before", "ok", "done")
    print("terminate called\n  what():  driver   gone", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def killed(asked: DoctorOptions) -> Iterator[Finding]:
    os.kill(os.getpid(), signal.SIGKILL)
    yield Finding("never", "ok", "")


def leaving(asked: DoctorOptions) -> Iterator[Finding]:
    sys.exit(3)
    yield Finding("never", "ok", "")


def hanging(asked: DoctorOptions) -> Iterator[Finding]:
    yield Finding("pid", "ok", "", figures={"pid": os.getpid()})
    time.sleep(60)
