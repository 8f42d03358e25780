"""Check of numba: whether it compiles a loop for this CPU with the same result as torch."""

import time
from collections.abc import Iterator

from offspec.engine.doctor.finding import DoctorOptions, Figure, Finding
from offspec.engine.doctor.worker import cause_of

_PART = "numba"
_SEED, _POSITION, _SIZE = 7, 11, 1000
_AGAIN = "pip install --upgrade --force-reinstall numba llvmlite"


def check(options: DoctorOptions) -> Iterator[Finding]:
    """Yield one finding: whether a row of noise from a compiled loop equals torch's bit for bit."""
    import torch

    from offspec_kernels.noise import torch_row

    began = time.perf_counter()
    try:
        import numba

        from offspec_kernels.noise.native import native_row

        got = native_row(_SEED, _POSITION, _SIZE)
    except Exception as error:  # numba raises many types, and others if numpy is too new for it
        yield Finding(_PART, "failed", f"a loop cannot be compiled: {cause_of(error)}", _AGAIN)
        return
    figures: dict[str, Figure] = {
        "version": numba.__version__,
        "seconds": round(time.perf_counter() - began, 2),
    }
    if not torch.equal(got, torch_row(_SEED, _POSITION, _SIZE, torch.device("cpu"))):
        found = f"{numba.__version__}: results of a compiled loop differ from torch"
        yield Finding(_PART, "failed", found, _AGAIN, figures)
        return
    found = f"{numba.__version__}: JIT compilation works, results match torch"
    yield Finding(_PART, "ok", found, figures=figures)
