"""oneDNN's small product, called like torch's compiled code does: C [M, N] float32 = A [M, K] B [K, N].

One call sums each value over all of K in one order, for any M and N.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from llvmlite import binding  # type: ignore[import-untyped]

from offspec_kernels.dequant.native import c_function

# Internal to torch, which may change them in any release; the mangled names contain the signatures.
_BRGEMM = "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"
_RELEASE = "_ZN2at6native7cpublas14brgemm_releaseEb"
_SUPPORTED = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")  # in torch.cpu

_RUNTIME = ("__gxx_personality_v0", "__cxa_begin_catch", "__cxa_end_catch")
# The function may throw: through ctypes and in numba's loops an exception would end the process.
_CALLER = """
declare i32 @__gxx_personality_v0(...)
declare i8* @__cxa_begin_catch(i8*)
declare void @__cxa_end_catch()

define i1 @attempt(i64 %address, {parameters}) personality i32 (...)* @__gxx_personality_v0 {{
  %function = inttoptr i64 %address to void ({types})*
  invoke void %function({parameters}) to label %returned unwind label %thrown
returned:
  ret i1 true
thrown:
  %found = landingpad {{ i8*, i32 }} catch i8* null
  %exception = extractvalue {{ i8*, i32 }} %found, 0
  call i8* @__cxa_begin_catch(i8* %exception)
  call void @__cxa_end_catch()
  ret i1 false
}}
"""


class Addresses(NamedTuple):
    """Addresses of the functions product(M, N, K, lda, ldb, ldc, add, A, B, C, pairs) and release(pairs).

    release ends a thread's use of the matrix unit, which other code configures differently."""

    product: int
    release: int


@cache
def find_brgemm() -> Addresses | None:
    """Return the functions if this torch has them and the CPU and oneDNN multiply bfloat16, else None."""
    if missing_symbols() or not processor_multiplies():
        return None
    library = ctypes.CDLL(str(_library()))
    found = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in (_BRGEMM, _RELEASE)]
    addresses = Addresses(*(address or 0 for address in found))
    return addresses if all(addresses) and _multiplies(addresses) else None


def missing_symbols() -> list[str]:
    """Return torch's internal names that `find_brgemm` needs and this torch does not have."""
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
    """Return whether oneDNN supports the product.

    ONEDNN_MAX_CPU_ISA may limit oneDNN to fewer instructions than the CPU has. oneDNN then throws, which
    would end the process when called from a compiled loop.
    """
    rows, pairs, sums = torch.ones(16, 32).bfloat16(), torch.ones(32, 16).bfloat16(), torch.zeros(16, 16)
    pointers = (rows.data_ptr(), pairs.data_ptr(), sums.data_ptr())
    made = _attempt(addresses.product, 16, 16, 32, 32, 16, 16, 0, *pointers, 1)
    return made and _attempt(addresses.release, 1) and bool((sums == 32).all())


def _attempt(address: int, *words: int) -> bool:
    """Call a C++ function. Return False if it threw.

    Raises OSError or AttributeError if this system does not have GNU's C++ library.

    Args:
        address: Address of the function, which returns nothing.
        words: Integer and pointer arguments of the function.
    """
    library = ctypes.CDLL("libstdc++.so.6")
    for name in _RUNTIME:
        binding.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    parameters = ", ".join(f"i64 %word{place}" for place in range(len(words)))
    code = _CALLER.format(parameters=parameters, types=", ".join(["i64"] * len(words)))
    machine = binding.Target.from_default_triple().create_target_machine()
    with binding.create_mcjit_compiler(binding.parse_assembly(code), machine) as engine:
        engine.finalize_object()
        call = ctypes.CFUNCTYPE(ctypes.c_bool, *[ctypes.c_int64] * (len(words) + 1))
        return bool(call(engine.get_function_address("attempt"))(address, *words))


call_product, call_release = c_function(11), c_function(1)
