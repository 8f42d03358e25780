"""What compiled loops are made of rounds as torch does, and their threads are waited for."""

import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numba
import numpy as np
import pytest
import torch
from torch import Tensor

from offspec_kernels.dequant import native
from offspec_kernels.dequant.native import array, compiled, half, in_bfloat16, in_half, put, spread

MANY = 4 * native._LEAST  # values that pay for four threads


@numba.njit
def _put_all(values, out):  # type: ignore[no-untyped-def]
    for i in range(len(values)):
        put(out, i, values[i])


@numba.njit
def _half_all(bits, out):  # type: ignore[no-untyped-def]
    for i in range(len(bits)):
        out[i] = half(bits[i])


@numba.njit
def _round_all(values, halves, brains):  # type: ignore[no-untyped-def]
    for i in range(len(values)):
        halves[i] = in_half(values[i])
        brains[i] = in_bfloat16(values[i])


def float32s() -> Tensor:
    """Of any bits; those half-way between two floats of 16 bits, and their neighbours; and small ones."""
    generator = torch.Generator().manual_seed(0)
    any_bits = torch.randint(-(2**31), 2**31, (1 << 18,), generator=generator)
    upper = torch.randint(-(2**15), 2**15, (1 << 14,), generator=generator) << 16
    ties = torch.cat([upper + 0x8000 + off for off in (-1, 0, 1)])
    upper = torch.randint(-(2**18), 2**18, (1 << 14,), generator=generator) << 13
    ties = torch.cat([ties, *(upper + 0x1000 + off for off in (-1, 0, 1))])
    signs = torch.tensor([0, 0x7F800000, 0x7F800001, 0x7FFFFFFF, 0x7FC00000, 0x7F7FFFFF, 1, 0x007FFFFF])
    bits = torch.cat([any_bits, ties, signs, signs - 2**31]).int()
    near = torch.tensor([65519.9961, 65520.0, 65504.0, 2.0**-14, 2.0**-25, 2.0**-24 * 1.5, 6.1e-5, 0.0])
    small = torch.randn(1 << 14, generator=generator) * 1e-5
    return torch.cat([bits.view(torch.float32), near, -near, small])


def assert_same(found: Tensor, wanted: Tensor) -> None:
    """To the bit, but for numbers that are none."""
    integers = {2: torch.int16, 4: torch.int32}[wanted.itemsize]
    number = ~wanted.isnan()
    assert torch.equal(~found.isnan(), number)
    assert torch.equal(found[number].view(integers), wanted[number].view(integers))


def test_bfloat16_is_rounded_as_torch_does() -> None:
    values = float32s()
    out = torch.zeros(len(values), dtype=torch.bfloat16)
    _put_all(array(values), array(out))
    assert_same(out, values.bfloat16())


def test_float32_stays_as_it_is() -> None:
    values = float32s()
    out = torch.zeros(len(values))
    _put_all(array(values), array(out))
    assert_same(out, values)


def test_every_float16() -> None:
    wanted = torch.arange(1 << 16, dtype=torch.int32).short().view(torch.float16)
    found = torch.zeros(1 << 16)
    _half_all(array(wanted), array(found))
    assert_same(found, wanted.float())


def test_rounding_to_16_bits_and_back() -> None:
    values = float32s()
    halves, brains = torch.zeros(2, len(values))
    _round_all(array(values), array(halves), array(brains))
    assert_same(halves, values.half().float())
    assert_same(brains, values.bfloat16().float())


@pytest.mark.parametrize(
    ("dtype", "seen"),
    [
        (torch.bfloat16, np.uint16),
        (torch.float16, np.uint16),
        (torch.float8_e4m3fn, np.uint8),
        (torch.uint8, np.uint8),
        (torch.int8, np.int8),
        (torch.int32, np.int32),
        (torch.float32, np.float32),
    ],
)
def test_an_array_is_the_tensors_memory(dtype: torch.dtype, seen: type) -> None:
    tensor = torch.nn.Parameter(torch.zeros(2, 3, dtype=dtype), requires_grad=False)
    view = array(tensor)
    assert view.dtype == seen and view.shape == (6,)
    view[4] = 1
    assert (tensor.view(-1).view(torch.uint8) != 0).sum() >= 1


@pytest.fixture
def four_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 1000])
@pytest.mark.parametrize("values", [0, MANY // 2, 100 * MANY])
def test_ranges_make_up_the_whole(count: int, values: int) -> None:
    ranges = list[tuple[int, int]]()
    spread(lambda start, end: ranges.append((start, end)), count, values)
    ranges.sort()
    assert [start for start, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
    assert ranges[-1][1] == count
    assert len(ranges) == max(1, min(4, count, values // native._LEAST))


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize("where", [0, 1, 3])
def test_a_failure_in_any_thread_is_told_when_all_are_done(where: int) -> None:
    done = list[int]()

    def work(start: int, end: int) -> None:
        if start == where:
            raise ValueError(f"at {start}")
        time.sleep(0.05)
        done.append(start)

    with pytest.raises(ValueError, match=f"^at {where}$"):
        spread(work, 4, MANY)
    assert sorted(done) == sorted({0, 1, 2, 3} - {where})


def _interrupted(own: Callable[[], None], other: Callable[[], None]) -> list[int]:
    """Which threads were done when spread gave the interrupt on."""
    begun, done = threading.Event(), list[int]()

    def work(start: int, end: int) -> None:
        if start == 0:
            begun.wait(10)
            own()
        else:
            begun.set()
            other()
            time.sleep(0.2)
            done.append(start)

    with pytest.raises(KeyboardInterrupt):
        spread(work, 2, MANY)
    return done


def _raise() -> None:
    raise KeyboardInterrupt


@pytest.mark.usefixtures("four_threads")
def test_an_interrupt_at_work_waits_for_the_others() -> None:
    assert _interrupted(own=_raise, other=lambda: None) == [1]


@pytest.mark.usefixtures("four_threads")
def test_an_interrupt_while_waiting_goes_on_waiting() -> None:
    main = threading.get_ident()

    def press() -> None:
        time.sleep(0.1)  # the main thread has come to the waiting
        signal.pthread_kill(main, signal.SIGINT)

    assert _interrupted(own=lambda: None, other=press) == [1]


_FORKING = """
import os, sys, torch
from offspec_kernels.dequant.native import spread
torch.get_num_threads = lambda: 4
done = []
spread(lambda start, end: done.append(start), 4, 1 << 20)
child = os.fork()
if child == 0:
    spread(lambda start, end: done.append(start), 4, 1 << 20)
    os._exit(0 if len(done) == 8 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_has_threads_of_its_own() -> None:
    words = [sys.executable, "-W", "ignore", "-c", _FORKING]
    assert subprocess.run(words, timeout=60).returncode == 0


def test_without_a_place_for_compiled_code() -> None:
    """A function that is in no file is kept nowhere, as where nothing can be written."""
    names = dict[str, Callable[[int], int]]()
    exec(compile("def twice(number):\n    return 2 * number\n", "<nowhere>", "exec"), names)
    with pytest.raises(RuntimeError, match="no locator available"):
        numba.njit(cache=True)(names["twice"])
    assert compiled(names["twice"])(math.floor(21.5)) == 42
