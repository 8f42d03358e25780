"""Check of Triton: whether a kernel compiles, runs on each GPU, and returns correct results."""

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from offspec.engine.doctor.finding import DoctorOptions, Figure, Finding
from offspec.engine.doctor.worker import cause_of
from offspec_planners.units import format_seconds

if TYPE_CHECKING:
    import torch

_PART = "Triton"
_CACHE = "TRITON_CACHE_DIR"
# Texts in error messages and their remedies; the first match counts.
_REMEDIES = (
    ("C compiler", "install a C compiler: sudo apt install gcc, or set CC to one"),
    ("Python.h", "install Python's headers: sudo apt install python3-dev"),
    ("ptxas", "pip install --force-reinstall triton, and unset TRITON_PTXAS_PATH"),
    ("libcuda", "sudo ldconfig, or set TRITON_LIBCUDA_PATH to the folder of libcuda.so"),
    ("No space left", f"free disk space, or set {_CACHE} to a folder on another disk"),
    ("Permission denied", f"set {_CACHE} to a writable folder"),
)
_AGAIN = "pip install --force-reinstall torch (it includes the matching Triton)"


def check(options: DoctorOptions) -> Iterator[Finding]:
    """Yield a finding for each GPU; without a GPU, one "absent" finding."""
    import torch

    from offspec_kernels.backend import choose_backend, has_triton

    if not torch.cuda.is_available():
        yield Finding(_PART, "absent", "torch cannot use a GPU; the CPU does not need Triton")
    elif not has_triton():
        yield Finding(
            _PART, "failed", "not installed, so GPU kernels cannot be compiled", "pip install triton"
        )
    else:
        for index in range(torch.cuda.device_count()):
            part, device = f"{_PART} on GPU {index}", torch.device("cuda", index)
            if choose_backend(device) == "triton":
                yield _kernel(part, device)
            else:
                yield Finding(part, "absent", "not used on this GPU; torch's operations are used instead")


def _kernel(part: str, device: "torch.device") -> Finding:
    """Compile a matrix product with an empty kernel cache and compare its result with torch's."""
    import torch

    from offspec_kernels.row_linear import row_linear

    numbers = torch.arange(96 * 80) % 7 - 3.0  # small integers, whose sums are exact
    rows, weight = numbers[: 16 * 80].view(16, 80), numbers.view(96, 80)
    began = time.perf_counter()
    try:
        with _fresh_cache():
            got = row_linear(rows.to(device), weight.to(device), path="triton").cpu()
    except Exception as error:  # from Triton, a C compiler or the driver
        return Finding(part, "failed", f"a kernel cannot be compiled: {cause_of(error)}", remedy_for(error))
    seconds = time.perf_counter() - began
    figures: dict[str, Figure] = {"seconds": round(seconds, 2)}
    if not torch.equal(got, rows @ weight.T):
        return Finding(part, "failed", "a kernel returns wrong results", _AGAIN, figures)
    return Finding(
        part,
        "ok",
        f"a kernel compiles in {format_seconds(seconds)} and returns correct results",
        figures=figures,
    )


def remedy_for(error: BaseException) -> str:
    """Return the remedy for an error of Triton."""
    if isinstance(error, subprocess.CalledProcessError):  # the compiler exists, Python's headers do not
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
