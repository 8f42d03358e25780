"""numba: whether a loop compiles for this processor, and gives what torch gives."""

import time
from collections.abc import Iterator

from offspec.engine.doctor.finding import Asked, Figure, Finding
from offspec.engine.doctor.worker import cause_of

_PART = "numba"
_SEED, _POSITION, _SIZE = 7, 11, 1000
_AGAIN = "pip install --upgrade --force-reinstall numba llvmlite"


def check(asked: Asked) -> Iterator[Finding]:
    """One finding: the noise of a row, compiled, is bit by bit that of torch's operations."""
    import torch

    from offspec_kernels.noise import torch_row

    began = time.perf_counter()
    try:
        import numba

        from offspec_kernels.noise.native import native_row

        got = native_row(_SEED, _POSITION, _SIZE)
    except Exception as error:  # numba has many of its own, and others where numpy is too new for it
        yield Finding(_PART, "failed", f"a loop cannot be compiled: {cause_of(error)}", _AGAIN)
        return
    figures: dict[str, Figure] = {
        "version": numba.__version__,
        "seconds": round(time.perf_counter() - began, 2),
    }
    if not torch.equal(got, torch_row(_SEED, _POSITION, _SIZE, torch.device("cpu"))):
        found = f"{numba.__version__} compiles a loop that gives other numbers than torch"
        yield Finding(_PART, "failed", found, _AGAIN, figures)
        return
    yield Finding(_PART, "ok", f"{numba.__version__} compiles, and gives what torch gives", figures=figures)
