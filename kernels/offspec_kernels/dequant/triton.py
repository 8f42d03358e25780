"""What the kernels of all formats share."""

import triton
import triton.language as tl


@triton.jit
def in_bfloat16(value):
    """float32 rounded to the nearest bfloat16, ties to even, as float32.

    By integers: triton's interpreter would cut the lower bits off.
    """
    bits = value.to(tl.uint32, bitcast=True)
    near = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
    return tl.where(value == value, near.to(tl.float32, bitcast=True), float("nan"))


@triton.jit
def put(out, place, value, inside):
    """Store float32 values at out + place, rounded once to the dtype that `out` points to."""
    if out.dtype.element_ty == tl.bfloat16:
        value = in_bfloat16(value)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)
