"""Choice of an operation's backend."""

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
    """Return `path` if given, else the backend in OFFSPEC_KERNELS, else the best backend for the device.

    Args:
        device: Device of the tensors.
        path: "reference", "eager" or "triton"; None lets the environment or the device decide.

    Raises:
        ArgumentError: The backend name is unknown.
        PathError: The backend cannot run on `device`.
    """
    asked = path or os.environ.get(VARIABLE)
    if not asked:
        return "triton" if device.type == "cuda" and triton_disabled_reason(device) is None else "eager"
    if asked not in get_args(Backend):
        name = "path" if path else VARIABLE
        raise ArgumentError(name, f"must be {', '.join(get_args(Backend))}, not {asked!r}")
    if asked == "triton":
        if not has_triton():
            raise PathError("the triton backend needs triton: pip install triton")
        if device.type != "cuda" and not is_interpreted():
            fix = f"or unset {VARIABLE} to use the default backend"
            raise PathError(f"the triton backend on {device.type} needs TRITON_INTERPRET=1; {fix}")
    return cast(Backend, asked)


def triton_disabled_reason(device: torch.device) -> str | None:
    """Return why triton is not the default on a CUDA device, as a clause, or None if it is.

    The first call compiles a kernel, which takes a second.
    """
    if device not in _refusals:
        _refusals[device] = _unavailable_reason(device)
    return _refusals[device]


def disable_triton(device: torch.device, reason: str) -> None:
    """Stop using triton by default on a CUDA device."""
    _refusals[device] = reason


def _unavailable_reason(device: torch.device) -> str | None:
    if not has_triton():
        return "triton is not installed (pip install triton)"
    # GPUs older than Ampere (2020) lack bfloat16.
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return "triton needs a GPU of compute capability 8.0 or higher"
    from offspec_kernels.triton_check import try_triton

    try:
        try_triton(device)
    except Exception as error:
        return f"triton could not run a kernel, which needs a C compiler such as gcc ({first_line(error)})"
    return None


def first_line(error: Exception) -> str:
    """Return the first line of the message, without the source and traces that compilers add."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def is_interpreted() -> bool:
    """Return whether triton runs its kernels in Python, on any device.

    triton reads the variable once, at import.
    """
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
