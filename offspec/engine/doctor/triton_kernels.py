"""Triton: whether a kernel compiles, runs on each GPU, and gives what it should."""

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from offspec.engine.doctor.finding import Asked, Figure, Finding
from offspec.engine.doctor.worker import cause_of
from offspec_planners.units import format_seconds

if TYPE_CHECKING:
    import torch

_PART = "Triton"
_CACHE = "TRITON_CACHE_DIR"
# What an error says, and what to do about it; the first that is found in it counts.
_REMEDIES = (
    ("C compiler", "install a C compiler: sudo apt install gcc, or name one with CC"),
    ("Python.h", "install Python's headers: sudo apt install python3-dev"),
    ("ptxas", "pip install --force-reinstall triton, and unset TRITON_PTXAS_PATH"),
    ("libcuda", "sudo ldconfig, or name the folder of libcuda.so with TRITON_LIBCUDA_PATH"),
    ("No space left", f"make room, or set {_CACHE} to a folder on another disk"),
    ("Permission denied", f"set {_CACHE} to a folder that you can write to"),
)
_AGAIN = "pip install --force-reinstall torch, which brings the Triton that it goes with"


def check(asked: Asked) -> Iterator[Finding]:
    """A finding for each GPU; one that nothing was tried where there is none."""
    import torch

    from offspec_kernels.backend import choose_backend, has_triton

    if not torch.cuda.is_available():
        yield Finding(_PART, "absent", "no GPU that torch can use; the processor has kernels of its own")
    elif not has_triton():
        yield Finding(
            _PART, "failed", "it is not installed, so kernels for GPUs are missing", "pip install triton"
        )
    else:
        for index in range(torch.cuda.device_count()):
            part, device = f"{_PART} on GPU {index}", torch.device("cuda", index)
            if choose_backend(device) == "triton":
                yield _kernel(part, device)
            else:
                yield Finding(part, "absent", "not used on this GPU; torch's own operations are")


def _kernel(part: str, device: "torch.device") -> Finding:
    """Compile a product of matrices, with nothing kept of an earlier time, and compare it with torch's."""
    import torch

    from offspec_kernels.row_linear import row_linear

    numbers = torch.arange(96 * 80) % 7 - 3.0  # small ones, whose sums are exact
    rows, weight = numbers[: 16 * 80].view(16, 80), numbers.view(96, 80)
    began = time.perf_counter()
    try:
        with _fresh_cache():
            got = row_linear(rows.to(device), weight.to(device), path="triton").cpu()
    except Exception as error:  # of Triton, of a C compiler, of the driver
        return Finding(part, "failed", f"a kernel cannot be compiled: {cause_of(error)}", remedy_for(error))
    seconds = time.perf_counter() - began
    figures: dict[str, Figure] = {"seconds": round(seconds, 2)}
    if not torch.equal(got, rows @ weight.T):
        return Finding(part, "failed", "a kernel gives wrong numbers", _AGAIN, figures)
    return Finding(
        part,
        "ok",
        f"a kernel compiles in {format_seconds(seconds)} and gives what it should",
        figures=figures,
    )


def remedy_for(error: BaseException) -> str:
    """What to do about an error of Triton's."""
    if isinstance(error, subprocess.CalledProcessError):  # a compiler is there, and its headers are not
        return dict(_REMEDIES)["Python.h"]
    return next((remedy for words, remedy in _REMEDIES if words in str(error)), _AGAIN)


@contextmanager
def _fresh_cache() -> Iterator[None]:
    before = os.environ.get(_CACHE)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[_CACHE] = folder
        try:
            yield
        finally:
            os.environ.pop(_CACHE, None)
            if before is not None:
                os.environ[_CACHE] = before
