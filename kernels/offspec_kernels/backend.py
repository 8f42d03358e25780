"""Which of an operation's paths is taken."""

import os
from functools import cache
from importlib.util import find_spec
from typing import Literal, cast, get_args

import torch

from offspec_kernels.errors import ArgumentError, PathError

Backend = Literal["reference", "eager", "triton"]
VARIABLE = "OFFSPEC_KERNELS"


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
        return "triton" if device.type == "cuda" and has_triton() and _capable(device) else "eager"
    if asked not in get_args(Backend):
        name = "path" if path else VARIABLE
        raise ArgumentError(name, f"must be {', '.join(get_args(Backend))}, not {asked!r}")
    if asked == "triton":
        if not has_triton():
            raise PathError("the triton path needs triton: pip install triton")
        if device.type != "cuda" and not interprets():
            raise PathError(f"the triton path on {device.type} needs TRITON_INTERPRET=1")
    return cast(Backend, asked)


@cache
def _capable(device: torch.device) -> bool:
    """Whether triton compiles all dtypes for it: Ampere (2020) and later."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def interprets() -> bool:
    """Whether triton runs its kernels in Python, on any device; read once by triton, when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
