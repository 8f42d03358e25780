"""Values of 4-bit codes by register lookup (AVX-512): a block contains at most 16 different values.

The 16 values are computed first: base[code] times the block's scale, plus its offset, rounded to bfloat16.
One instruction then looks up the values of 32 codes; arithmetic on each code would take about twenty. LLVM
has no portable form of this instruction, so it is written in LLVM IR.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from offspec_kernels.dequant.native import inlined

Order = Literal["low", "high", "planes", "high first"]
AHEAD = 4  # prefetch distance in rows, from the row being decoded
_CODES = 16
_BYTE, _SHORT, _INT, _FLOAT = *(ir.IntType(bits) for bits in (8, 16, 32)), ir.FloatType()
_FLOATS, _INTS = ir.VectorType(_FLOAT, _CODES), ir.VectorType(_INT, _CODES)
_SHORTS = ir.VectorType(_SHORT, 32)
_NAN = 0x7FC0  # NaN in bfloat16


@cache
def has_lookups() -> bool:
    """Return whether numba compiles for a CPU with the required instructions (AVX-512, with float16)."""
    settings: Any = numba.config
    if settings.CPU_NAME or settings.CPU_FEATURES:
        return False  # it compiles for another CPU
    return bool(llvm.get_host_cpu_features().get("avx512bw"))


@intrinsic
def _fetch(context: Any, address: Any) -> Any:
    """Prefetch the cache line at an address, which need not be valid."""

    def generate(context: Any, build: Any, signature: Any, given: Any) -> Any:
        pointer = _BYTE.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, _INT, _INT, _INT])
        name = "llvm.prefetch.p0"
        fetch = build.module.globals.get(name) or ir.Function(build.module, kind, name)
        build.call(
            fetch, [build.inttoptr(given[0], pointer), *(ir.Constant(_INT, flag) for flag in (0, 3, 1))]
        )
        return context.get_dummy_value()

    return types.void(types.int64), generate


_fetch_line: Callable[[int], None] = _fetch  # type: ignore[assignment]  # numba gives the context


@inlined
def fetch_ahead(address: int, nbytes: int) -> None:
    """Prefetch bytes into the cache. Pieces of rows are too short for the CPU's own prefetcher."""
    for at in range(0, nbytes, 64):
        _fetch_line(address + at)


def _lookup(order: Order, *, offset: bool, halves: bool) -> Callable[..., None]:
    """Return look_up(codes, base, size, offset, out) for compiled loops; all but two numbers are addresses.

    Args:
        order: Order of 32 values in their bytes. "low", "high": halves of 32 bytes. "planes": low halves of
            16 bytes, then their high halves. "high first": both halves of each of 16 bytes.
        offset: Whether to add the offset; if not, it is ignored, so that a value of -0 does not become 0.
        halves: Whether to round the values to float16 first.

    base: 16 float32; size, offset: float32; out: 32 bfloat16.
    """

    @intrinsic
    def look_up(context: Any, codes: Any, base: Any, size: Any, shift: Any, out: Any) -> Any:
        def generate(context: Any, build: Any, signature: Any, given: Any) -> Any:
            at, entries, scale, added, target = given
            values = build.fmul(_load(build, entries, _FLOATS), _everywhere(build, scale, _FLOATS))
            if offset:
                values = build.fadd(values, _everywhere(build, added, _FLOATS))
            made = _rounded(build, _through_halves(build, values) if halves else values)
            twice = _chosen(
                build, made, made, [place % _CODES for place in range(32)]
            )  # whatever the fifth bit
            found = build.call(_permute(build.module), [twice, _places(build, order, at)])
            build.store(found, build.inttoptr(target, _SHORTS.as_pointer()), align=2)
            return context.get_dummy_value()

        number, address = types.float32, types.int64
        return types.void(address, address, number, number, address), generate

    found: Callable[..., None] = look_up
    return found


def scaled_row(bits: int, places: tuple[int, ...], *, halves: bool) -> Callable[..., None]:
    """Return scale_row(words, shift, zeros, scales, out) for compiled loops: (code - zero) * scale, 64
    columns.

    All but the shift are addresses: of int32 words, each with one column's code per entry of `places`;
    64 uint8; 64 float32; 64 bfloat16.

    Args:
        bits: Bits of a code.
        places: Bit positions of the columns' codes in a word; the shift in bits, int32, is added to all.
        halves: Whether to round the products to float16 first.
    """
    each = len(places)

    @intrinsic
    def scale_row(context: Any, words: Any, shift: Any, zeros: Any, scales: Any, out: Any) -> Any:
        def generate(context: Any, build: Any, signature: Any, given: Any) -> Any:
            wide = ir.VectorType(_INT, 64)
            some = _load(build, given[0], ir.VectorType(_INT, 64 // each))
            codes = _chosen(build, some, some, [column // each for column in range(64)])
            behind = ir.Constant(wide, [bits * places[column % each] for column in range(64)])
            behind = build.add(behind, _everywhere(build, given[1], wide))
            codes = build.and_(build.lshr(codes, behind), _same((1 << bits) - 1, wide))
            zero = build.zext(_load(build, given[2], ir.VectorType(_BYTE, 64)), wide)
            values = build.sitofp(build.sub(codes, zero), ir.VectorType(_FLOAT, 64))
            values = build.fmul(values, _load(build, given[3], values.type))
            made = _rounded(build, _through_halves(build, values) if halves else values)
            build.store(made, build.inttoptr(given[4], made.type.as_pointer()), align=2)
            return context.get_dummy_value()

        address = types.int64
        return types.void(address, types.int32, address, address, address), generate

    found: Callable[..., None] = scale_row
    return found


def _load(build: Any, address: Any, kind: Any) -> Any:
    return build.load(build.inttoptr(address, kind.as_pointer()), align=1)


def _same(value: int, kind: Any) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def _chosen(build: Any, first: Any, second: Any, places: list[int]) -> Any:
    order = ir.Constant(ir.VectorType(_INT, len(places)), places)
    return build.shuffle_vector(first, second, order)


def _everywhere(build: Any, number: Any, kind: Any) -> Any:
    none = ir.Constant(kind, ir.Undefined)
    first = build.insert_element(none, number, ir.Constant(_INT, 0))
    return _chosen(build, first, none, [0] * kind.count)


def _through_halves(build: Any, values: Any) -> Any:
    """Round float32 to the nearest float16, as float32."""
    return build.fpext(build.fptrunc(values, ir.VectorType(ir.HalfType(), values.type.count)), values.type)


def _rounded(build: Any, values: Any) -> Any:
    """Round float32 to the nearest bfloat16, ties to even, as 16-bit words."""
    kind = ir.VectorType(_INT, values.type.count)
    bits = build.bitcast(values, kind)
    even = build.and_(build.lshr(bits, _same(16, kind)), _same(1, kind))
    near = build.lshr(build.add(build.add(bits, _same(0x7FFF, kind)), even), _same(16, kind))
    near = build.select(build.fcmp_unordered("uno", values, values), _same(_NAN, kind), near)
    return build.trunc(near, ir.VectorType(_SHORT, kind.count))


def _places(build: Any, order: Order, at: Any) -> Any:
    """Return 32 codes of 4 bits; bits above the fifth are arbitrary."""
    if order in ("low", "high"):
        codes = build.zext(_load(build, at, ir.VectorType(_BYTE, 32)), _SHORTS)
        return codes if order == "low" else build.lshr(codes, _same(4, _SHORTS))
    some = _load(build, at, ir.VectorType(_BYTE, 16))
    if order == "planes":
        high = build.lshr(some, _same(4, some.type))
        return build.zext(_chosen(build, some, high, list(range(32))), _SHORTS)
    wide = build.zext(some, _INTS)
    high = build.lshr(wide, _same(4, _INTS))
    return build.bitcast(build.or_(high, build.shl(wide, _same(16, _INTS))), _SHORTS)


def _permute(module: Any) -> Any:
    name = "llvm.x86.avx512.permvar.hi.512"
    kind = ir.FunctionType(_SHORTS, [_SHORTS, _SHORTS])
    return module.globals.get(name) or ir.Function(module, kind, name)


look_up_planes, look_up_high_first = (
    _lookup(order, offset=False, halves=False) for order in ("planes", "high first")
)
shifted_low, shifted_high = (_lookup(order, offset=True, halves=False) for order in ("low", "high"))
halves_high_first = _lookup("high first", offset=False, halves=True)
