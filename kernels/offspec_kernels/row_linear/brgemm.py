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

_BRGEMM = "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"  # the signature is in the name
_RELEASE = "_ZN2at6native7cpublas14brgemm_releaseEb"


class Addresses(NamedTuple):
    """Of the functions. product(M, N, K, lda, ldb, ldc, add, A, B, C, pairs); release(pairs) ends a thread's
    use of the matrix unit, which other code sets up otherwise."""

    product: int
    release: int


@cache
def find_brgemm() -> Addresses | None:
    """The functions, where this torch has them, and processor and oneDNN multiply bfloat16."""
    folder = Path(torch.__file__).parent / "lib"
    try:
        if not (
            torch.backends.mkldnn.enabled
            and (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())
        ):
            return None
        library = ctypes.CDLL(str(folder / "libtorch_cpu.so"))
        found = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in (_BRGEMM, _RELEASE)]
        addresses = Addresses(*(address or 0 for address in found))
        return addresses if all(addresses) and _multiplies(addresses) else None
    except (OSError, AttributeError):
        return None


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
