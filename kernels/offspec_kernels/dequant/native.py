"""Loops over bytes, compiled for this CPU by numba on their first call.

torch has no unpacking operation, and a chain of elementwise operations moves each byte a dozen times. The
compiled code is cached next to the source, or in the user's cache, so that only the first run compiles.
Numba checks whether a loop's own file has changed, but not the helpers in this file: after changing them,
delete its cache (`find kernels -name "*.nb[ic]" -delete`).
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic, overload, register_jitable
from torch import Tensor

Loop = TypeVar("Loop", bound=Callable[..., Any])
Array = np.ndarray[Any, np.dtype[Any]]


def compiled(loop: Loop, *, allow: frozenset[str] = frozenset()) -> Loop:
    """Compile a loop over arrays; it runs without the GIL, so several can run at once.

    allow: LLVM fast-math flags to enable, such as "contract" and "reassoc".
    """
    return cast(
        Loop, _compile_cached(partial(numba.njit, nogil=True, error_model="numpy", fastmath=set(allow)), loop)
    )


fused = partial(compiled, allow=frozenset({"contract"}))  # a product and a sum may be fused


def _compile_cached(compile: Any, loop: Any) -> Any:
    """Compile a loop, caching it on disk if there is a writable folder."""
    try:
        return compile(cache=True)(loop)
    except RuntimeError:
        return compile()(loop)


WIDE = 64  # columns dequantized together of a weight stored transposed
carray: Any = numba.carray  # type: ignore[attr-defined]  # carray(pointer, shape, dtype) is an array
Fill = Callable[[Any, Any, Any, int, int, int, int, int, Any], None]


def compile_fill(fill: Fill) -> int:
    """Compile fill(first, second, third, number, columns, row, place, count, out) and return its address.

    It writes columns [place, place + count) of a row of a weight, as bfloat16 or float32. For a transposed
    format it writes `count` stored rows from `row` on, columns [place, place + `WIDE`) of each, or the
    remaining ones, with rows `WIDE` apart. Through the address one loop can call it for all formats, and
    LLVM vectorizes its loops, which it does not do deep inside of others.

    It may close over numbers, dtypes and `inlined` functions of modules; with anything else, such as
    intrinsics, every process would compile it again.

    first, second, third, out: pointers, for `carray`. All others are integers. columns: of a stored row.
    """
    pointer, number = numba.types.voidptr, numba.types.int64
    kind = numba.types.void(pointer, pointer, pointer, *[number] * 5, pointer)
    return int(_compile_cached(partial(numba.cfunc, kind, error_model="numpy"), fill).address)


@cache
def compile_job(loop: Callable[[Any], None]) -> int:
    """Compile loop(job) for `threads.run_parallel` and return its address; job: a pointer, for `carray`.

    For what it may close over, see `compile_fill`.
    """
    kind = numba.types.void(numba.types.voidptr)
    return int(_compile_cached(partial(numba.cfunc, kind, error_model="numpy"), loop).address)


def c_function(arguments: int) -> Any:
    """Return call(address, ...) for a C function of `arguments` integers or pointers, passed as int64."""

    @intrinsic
    def call(context: Any, address: Any, values: Any) -> Any:
        def generate(context: Any, build: Any, signature: Any, given: Any) -> Any:
            word = ir.IntType(64)
            function = ir.FunctionType(ir.VoidType(), [word] * arguments)
            pointer = build.inttoptr(given[0], function.as_pointer())
            words = [build.extract_value(given[1], place) for place in range(arguments)]
            build.call(pointer, words)
            return context.get_dummy_value()

        tuple_type: Any = numba.types.UniTuple
        return numba.types.void(numba.types.int64, tuple_type(numba.types.int64, arguments)), generate

    return call


call_fill = c_function(9)  # with the arguments of `compile_fill`


@intrinsic
def _claim(context: Any, address: Any) -> Any:
    def generate(context: Any, build: Any, signature: Any, given: Any) -> Any:
        word = ir.IntType(64)
        counter = build.inttoptr(given[0], word.as_pointer())
        return build.atomic_rmw("add", counter, ir.Constant(word, 1), "monotonic")

    return numba.types.int64(numba.types.int64), generate


@intrinsic
def _pointer(context: Any, address: Any) -> Any:
    def generate(context: Any, build: Any, signature: Any, given: Any) -> Any:
        return build.inttoptr(given[0], ir.IntType(8).as_pointer())

    return numba.types.voidptr(numba.types.int64), generate


claim: Callable[[int], int] = _claim  # type: ignore[assignment]  # returns the int64 there, then increments it
pointer: Callable[[int], Any] = _pointer  # type: ignore[assignment]  # of an address, for `carray`


def inlined(helper: Loop) -> Loop:
    """Make a function callable from compiled loops."""
    usable: Loop = register_jitable(helper)
    return usable


def put(out: Array, place: int, value: float) -> None:
    """Store a float32 in an array of float32, or, rounded to the nearest bfloat16, in one of uint16.

    Ties go to even, and NaN stays NaN. Works in compiled loops only.
    """
    raise NotImplementedError


@overload(put)
def _put(out: Any, place: Any, value: Any) -> Any:
    if out.dtype == numba.uint16:

        def rounded(out: Any, place: Any, value: Any) -> None:
            out[place] = np.uint16(np.float32(in_bfloat16(value)).view(np.uint32) >> np.uint32(16))

        return rounded

    def plain(out: Any, place: Any, value: Any) -> None:
        out[place] = np.float32(value)

    return plain


@inlined
def half(bits: int) -> Any:
    """Return the float32 of a float16's 16 bits."""
    # No branch on the sign, which no CPU can predict.
    word = np.uint32(np.uint32((bits & 0x7FFF) << 13) | np.uint32((bits & 0x8000) << 16))
    if (bits & 0x7C00) == 0x7C00:
        return np.uint32(word | np.uint32(0x7F800000)).view(np.float32)
    return word.view(np.float32) * np.float32(2.0**112)


@inlined
def from_bfloat16(bits: int) -> Any:
    """Return the float32 of a bfloat16's bits."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


def widen(row: Array, is_half: bool, out: Array) -> None:
    """Convert a row of float32, or of 16-bit floats as uint16, to float32."""
    raise NotImplementedError  # works in compiled loops only


@overload(widen)
def _widen(row: Any, is_half: Any, out: Any) -> Any:
    if row.dtype == numba.float32:

        def copied(row: Any, is_half: Any, out: Any) -> None:
            for d in range(len(out)):
                out[d] = row[d]

        return copied

    def widened(row: Any, is_half: Any, out: Any) -> None:
        if is_half:
            for d in range(len(out)):
                out[d] = half(row[d])
        else:
            for d in range(len(out)):
                out[d] = from_bfloat16(row[d])

    return widened


@inlined
def in_bfloat16(value: Any) -> Any:
    """Round a float32 to the nearest bfloat16, ties to even, as a float32."""
    bits = np.float32(value).view(np.uint32)
    even = np.uint32(bits >> np.uint32(16)) & np.uint32(1)
    near = np.uint32(np.uint32(bits + np.uint32(0x7FFF) + even) & np.uint32(0xFFFF0000)).view(np.float32)
    return near if value == value else np.float32(np.nan)


@inlined
def in_half(value: Any) -> Any:
    """Round a float32 to the nearest float16, ties to even, as a float32."""
    bits = np.float32(value).view(np.uint32)
    sign, rest = np.uint32(bits & np.uint32(0x80000000)), np.uint32(bits & np.uint32(0x7FFFFFFF))
    size = np.uint32(rest).view(np.float32)
    even = np.uint32(rest >> np.uint32(13)) & np.uint32(1)
    normal = np.uint32(np.uint32(rest + np.uint32(0xFFF) + even) & np.uint32(0xFFFFE000)).view(np.float32)
    # Below 2^-14 the steps of float16 are 2^-24, which adding and subtracting 0.5 rounds a float32 to.
    small = (size + np.float32(0.5)) - np.float32(0.5)
    near = normal if size >= np.float32(2.0**-14) else small
    finite = near if size < np.float32(65520.0) else size * np.float32(np.inf)
    return np.uint32(np.float32(finite).view(np.uint32) | sign).view(np.float32)


def array(tensor: Tensor) -> Array:
    """Return a flat view of a contiguous CPU tensor: 16-bit floats as uint16, 8-bit ones as uint8."""
    flat = tensor.detach().view(-1)
    if tensor.dtype in (torch.bfloat16, torch.float16):
        return cast(Array, flat.view(torch.int16).numpy().view(np.uint16))
    if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point:
        return cast(Array, flat.view(torch.uint8).numpy())
    return cast(Array, flat.numpy())


@compiled
def fill_rows(fill: int, parts: Any, number: int, columns: int, out: Any, start: int, end: int) -> None:
    """Fill rows [start, end) of out, flat, with a function from `compile_fill`; parts: three addresses."""
    one, two, three = parts
    for row in range(start, end):
        call_fill(fill, (one, two, three, number, columns, row, 0, columns, out[row * columns :].ctypes.data))
