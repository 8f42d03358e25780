"""oneDNN's small product, as torch's own compiled code calls it: C [M, N] float32 = A [M, K] B [K, N].

One call sums up each value over all of K in one order, whatever M and N are.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from offspec_kernels.dequant.native import calling
from offspec_kernels.row_linear.attempt import attempt

# torch has them for itself, and may change them in any release; the signatures are in the names.
_BRGEMM = "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"
_RELEASE = "_ZN2at6native7cpublas14brgemm_releaseEb"
_SUPPORTED = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")  # in torch.cpu


class Addresses(NamedTuple):
    """Of the functions. product(M, N, K, lda, ldb, ldc, add, A, B, C, pairs); release(pairs) ends a thread's
    use of the matrix unit, which other code sets up otherwise."""

    product: int
    release: int


@cache
def find_brgemm() -> Addresses | None:
    """The functions, where this torch has them, and processor and oneDNN multiply bfloat16."""
    if missing_symbols() or not processor_multiplies():
        return None
    library = ctypes.CDLL(str(_library()))
    found = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in (_BRGEMM, _RELEASE)]
    addresses = Addresses(*(address or 0 for address in found))
    return addresses if all(addresses) and _multiplies(addresses) else None


def missing_symbols() -> list[str]:
    """Private names of torch that `find_brgemm` needs and this torch does not have."""
    missing = [f"torch.cpu.{name}" for name in _SUPPORTED if not hasattr(torch.cpu, name)]
    try:
        library = ctypes.CDLL(str(_library()))
    except OSError:
        return [*missing, _library().name]
    return missing + [name for name in (_BRGEMM, _RELEASE) if not hasattr(library, name)]


def processor_multiplies() -> bool:
    """Return whether this processor has instructions for bfloat16, and torch uses oneDNN."""
    return bool(torch.backends.mkldnn.enabled) and any(getattr(torch.cpu, name)() for name in _SUPPORTED)


def _library() -> Path:
    return Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"


def _multiplies(addresses: Addresses) -> bool:
    """Return whether oneDNN makes such a product.

    ONEDNN_MAX_CPU_ISA may allow it fewer instructions than the processor has. It throws then, which would end
    the process where a compiled loop calls it.
    """
    rows, pairs, sums = torch.ones(16, 32).bfloat16(), torch.ones(32, 16).bfloat16(), torch.zeros(16, 16)
    pointers = (rows.data_ptr(), pairs.data_ptr(), sums.data_ptr())
    made = attempt(addresses.product, 16, 16, 32, 32, 16, 16, 0, *pointers, 1)
    return made and attempt(addresses.release, 1) and bool((sums == 32).all())


call_product, call_release = calling(11), calling(1)
