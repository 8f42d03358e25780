"""Which of an operation's paths is taken."""

import os
from functools import cache
from importlib.util import find_spec
from typing import Literal, cast, get_args

import torch

from offspec_kernels.errors import ArgumentError, PathError

Backend = Literal["reference", "eager", "triton"]
VARIABLE = "OFFSPEC_KERNELS"

_refusals: dict[torch.device, str | None] = {}


def choose_backend(device: torch.device, path: Backend | None = None) -> Backend:
    """The backend of an operation: `path`, else what OFFSPEC_KERNELS says, else what suits the device.

    Args:
        device: Where the tensors are.
        path: "reference", "eager" or "triton"; None lets the environment or the device decide.

    Raises:
        ArgumentError: There is no backend of that name.
        PathError: It cannot run on `device`.
    """
    asked = path or os.environ.get(VARIABLE)
    if not asked:
        return "triton" if device.type == "cuda" and refusal(device) is None else "eager"
    if asked not in get_args(Backend):
        name = "path" if path else VARIABLE
        raise ArgumentError(name, f"must be {', '.join(get_args(Backend))}, not {asked!r}")
    if asked == "triton":
        if not has_triton():
            raise PathError("the triton path needs triton: pip install triton")
        if device.type != "cuda" and not interprets():
            fix = f"without {VARIABLE} the path that suits it is taken"
            raise PathError(f"the triton path on {device.type} needs TRITON_INTERPRET=1; {fix}")
    return cast(Backend, asked)


def refusal(device: torch.device) -> str | None:
    """Why a CUDA device gets no triton unless it is asked for, in a clause; None where it does.

    The first time a kernel is compiled, which takes a second.
    """
    if device not in _refusals:
        _refusals[device] = _obstacle(device)
    return _refusals[device]


def refuse(device: torch.device, reason: str) -> None:
    """Let a CUDA device have no triton from now on, unless it is asked for."""
    _refusals[device] = reason


def _obstacle(device: torch.device) -> str | None:
    if not has_triton():
        return "triton is not installed (pip install triton)"
    # Older ones than Ampere (2020) lack bfloat16.
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return "triton needs a GPU of compute capability 8.0 or higher"
    from offspec_kernels.triton_trial import try_triton

    try:
        try_triton(device)
    except Exception as error:
        return f"triton could not run a kernel, which takes a C compiler such as gcc ({first_line(error)})"
    return None


def first_line(error: Exception) -> str:
    """What it says, without the source and the traces that compilers add."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def interprets() -> bool:
    """Whether triton runs its kernels in Python, on any device; read once by triton, when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
