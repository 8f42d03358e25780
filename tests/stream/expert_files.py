"""Expert files for tests of the expert stores, and a simulated Ctrl-C at any line of a store."""

import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from offspec.checkpoint import TensorInfo
from offspec.stream.arena import PAGE
from offspec.stream.layout import UnitLayout, lay_out

UNITS, SIZE, START = 9, 2 * PAGE + 77, 13


def write_experts(folder: Path) -> Path:
    data = torch.randint(0, 256, (START + UNITS * SIZE + PAGE,), dtype=torch.uint8)
    (folder / "weights").write_bytes(bytes(data.numpy()))
    return folder / "weights"


def layouts_in(file: Path) -> list[UnitLayout]:
    return [
        lay_out(f"expert {i}", [TensorInfo(f"t{i}", "U8", (SIZE,), file, START + i * SIZE, SIZE)])
        for i in range(UNITS)
    ]


def contents_of(file: Path) -> list[bytes]:
    data = file.read_bytes()[START:]
    return [data[i * SIZE : (i + 1) * SIZE] for i in range(UNITS)]


def interrupt_at_each_line(
    files: Collection[str | None],
    moments: range,
    act: Callable[[int], object],
    rest: Callable[[], object],
    check: Callable[[int], object],
) -> int:
    """Return the number of tries in which `act` was interrupted.

    Args:
        files: Source files with the lines to interrupt.
        moments: Count of executed lines after which `act` is interrupted, one per try.
        act: Function to interrupt.
        rest: Function called after an interrupted `act`, and itself possibly interrupted.
        check: Function called after each try, without interrupts.
    """
    left, struck = 0, 0

    def strike(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return strike

    for moment in moments:
        left = moment
        sys.settrace(strike)
        try:
            act(moment)
        except KeyboardInterrupt:
            struck += 1
            left = moment % 7 + 1
            with suppress(KeyboardInterrupt):
                rest()
        finally:
            sys.settrace(None)
        check(moment)
    return struck
