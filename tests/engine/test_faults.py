"""Faults of disks, memory and threads, and Ctrl-C at any moment, injected into whole engines.

Whatever happens, the caller gets one typed error, nothing hangs or leaks, and the engine goes on.
"""

import ctypes
import errno
import gc
import mmap
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import offspec
from offspec import CapacityError, StreamError
from offspec.engine.engine import Engine
from offspec_planners.placement import Placement, Tier
from tests.support.answers import PROMPT, TargetAndDrafts, generate_tokens, sampling
from tests.support.tiny_models import tiny_engine, write_model
from tests.support.weight_files import restorer

PARAMS = sampling(1.0, 12)

# Reads behind copies, and a head that streams.
TIERS = Placement((Tier.DISK, Tier.HOST, Tier.DEVICE, Tier.DISK), 2, 2, Tier.DISK)


@pytest.fixture(scope="module")
def expected(trio: TargetAndDrafts) -> tuple[int, ...]:
    return generate_tokens(trio.target, PARAMS)[0]


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    def census() -> tuple[int, int, bool, bool]:
        ours = [thread for thread in threading.enumerate() if thread.name.startswith("offspec-")]
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return len(os.listdir("/proc/self/fd")), len(ours), *modes

    gc.collect()  # what earlier tests have left may hold files
    before = census()
    yield
    assert census() == before, "a thread, a descriptor or a mode of torch leaked"


Preadv = Callable[[int, list[memoryview], int], int]


def _inject(monkeypatch: pytest.MonkeyPatch, fault: Callable[[Preadv, int], Preadv]) -> None:
    """Make the n-th read and later ones go through `fault(real, n)`."""
    real, calls = os.preadv, iter(range(10**9))

    def read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return fault(real, next(calls))(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)


def _generate(engine: Engine) -> tuple[int, ...]:
    return engine.generate(PROMPT, PARAMS).token_ids


def test_short_and_interrupted_reads_change_nothing(
    trio: TargetAndDrafts, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(real: Preadv, call: int) -> Preadv:
        def read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            if call % 3 == 0:
                raise InterruptedError(errno.EINTR, "Interrupted system call")
            if call % 3 == 1 and len(buffers[0]) > mmap.PAGESIZE:
                return real(descriptor, [memoryview(buffers[0])[: mmap.PAGESIZE]], offset)
            return real(descriptor, buffers, offset)

        return read

    _inject(monkeypatch, fault)
    assert generate_tokens(trio.target, PARAMS, draft=trio.target, placement=TIERS) == [expected]


@pytest.mark.parametrize(
    ("failure", "moment"),
    [(OSError(errno.EIO, "Input/output error"), 7), (MemoryError(), 0), (SystemExit(3), 1)],
    ids=["disk", "memory", "thread"],
)
def test_a_failing_read_is_one_error_with_its_place(
    trio: TargetAndDrafts,
    expected: tuple[int, ...],
    failure: BaseException,
    moment: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reads of the target; for failed reads of a draft see `tests/draft/test_fault_tolerant.py`."""
    with tiny_engine(trio.target, "none", placement=TIERS) as engine:
        assert _generate(engine) == expected
        broken = threading.Event()

        def fault(real: Preadv, call: int) -> Preadv:
            def read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
                main = threading.current_thread() is threading.main_thread()
                if call >= moment and not broken.is_set() and not (main and isinstance(failure, SystemExit)):
                    broken.set()
                    raise failure
                return real(descriptor, buffers, offset)

            return read

        _inject(monkeypatch, fault)
        with pytest.raises(StreamError) as caught:
            for _ in range(20):
                _generate(engine)
        assert caught.value.file.name == "model.safetensors" and caught.value.offset >= 0
        assert "\n" not in str(caught.value)
        assert _generate(engine) == expected


def test_a_file_that_is_replaced_is_noticed(
    trio: TargetAndDrafts, expected: tuple[int, ...], tmp_path: Path
) -> None:
    """A file that was overwritten in place or touched is an error until bytes and time are restored.

    Otherwise half of a pass might use another model. Replacing a file by renaming is harmless: the old file
    stays open.
    """
    file = Path(shutil.copytree(trio.target, tmp_path / "model")) / "model.safetensors"
    other = write_model(tmp_path / "other", num_hidden_layers=4, seed=8) / "model.safetensors"
    with tiny_engine(file.parent, "none", placement=TIERS) as engine:
        assert _generate(engine) == expected
        put_back = restorer(file)
        for change in (os.utime, lambda file: file.write_bytes(other.read_bytes())):
            change(file)
            for _ in range(2):
                with pytest.raises(StreamError, match="replaced"):
                    _generate(engine)
        put_back()
        assert _generate(engine) == expected
        os.replace(other, file)
        assert _generate(engine) == expected


def _kill(name: str) -> None:
    """End threads abruptly, by an asynchronous exception."""
    for thread in threading.enumerate():
        if thread.name.startswith(name) and thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
            )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", ["offspec-read", "offspec-copy"])
def test_threads_that_die_are_replaced(trio: TargetAndDrafts, expected: tuple[int, ...], name: str) -> None:
    with tiny_engine(trio.target, "none", placement=TIERS) as engine:
        assert _generate(engine) == expected
        _kill(name)
        with pytest.raises(StreamError, match="thread"):
            for _ in range(20):
                _generate(engine)
        assert _generate(engine) == expected


@pytest.mark.parametrize("moment", [0, 2, 5])
def test_memory_that_is_refused_while_loading(
    trio: TargetAndDrafts, moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = mmap.mmap, iter(range(1000))

    def refusing(*args: Any, **kwargs: Any) -> mmap.mmap:
        if args[0] == -1 and next(calls) == moment:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return real(*args, **kwargs)

    monkeypatch.setattr(mmap, "mmap", refusing)
    with pytest.raises(CapacityError, match="refused"):
        offspec.load(str(trio.target), budget=16).close()


def test_memory_that_is_refused_in_a_pass(trio: TargetAndDrafts, expected: tuple[int, ...]) -> None:
    with tiny_engine(trio.target, "none", placement=TIERS) as engine:
        layer: Any = engine._assembly.target.skeleton.layers[2]
        for failure in (
            MemoryError(),
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            torch.OutOfMemoryError("none"),
        ):
            with pytest.MonkeyPatch.context() as patch, pytest.raises(CapacityError, match="`context`"):
                patch.setattr(layer.mlp, "forward", Mock(side_effect=failure))
                _generate(engine)
            assert _generate(engine) == expected


# An interrupt may strike in a callback of the collector (hypothesis has one), where Python can but report it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_moment(trio: TargetAndDrafts, expected: tuple[int, ...]) -> None:
    """Interrupts at moments of a whole answer, each followed by one while the first is handled."""
    left, whole = 0, 0.0  # whole: seconds of the quickest answer so far

    def strike(number: int, frame: FrameType | None) -> None:
        nonlocal left
        if left > 0:
            left -= 1
            raise KeyboardInterrupt

    def interrupted(moment: float, strikes: int) -> bool:
        """Return whether an answer was interrupted.

        Each interrupt has an `except`, since the second may arrive while the first is handled.
        """
        nonlocal left, whole
        left, done, began = strikes, False, time.perf_counter()
        try:
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, moment, 0.004)
                    _generate(engine)
                    done, whole = True, min(whole, time.perf_counter() - began)
                finally:
                    left = 0
            except KeyboardInterrupt:
                left = 0
        except KeyboardInterrupt:
            left = 0
        return not done

    before = signal.signal(signal.SIGALRM, strike)
    try:
        with tiny_engine(trio.target, trio.near, placement=TIERS) as engine:
            assert _generate(engine) == expected
            began = time.perf_counter()
            assert _generate(engine) == expected
            whole, struck = time.perf_counter() - began, 0
            for turn in range(40):
                struck += interrupted(whole * (turn + 1) / 50, 1 + turn % 2)
                if turn % 4 == 3:
                    assert _generate(engine) == expected
            assert struck > 6, "the interrupts came too late to show anything"
            assert _generate(engine) == expected
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
