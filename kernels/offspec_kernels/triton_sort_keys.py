"""Scores as integers inside a kernel, so that one maximum finds the best score and the lowest id that has it.

A key holds a float32 in its upper half, mapped so that integers compare as the floats do, and the
complement of an id below 2^32 in its lower half. No two ids have the same key.
"""

import triton
import triton.language as tl

NOTHING = tl.constexpr(-(2**63))  # below the key of every score

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)  # all bits of an int32 but the sign
_LOW = tl.constexpr(0xFFFFFFFF)


@triton.jit
def order(x):
    """float32 -> int32 in the same order: -inf smallest, both zeros equal, NaN largest."""
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x != x, _MAGNITUDE, bits ^ ((bits >> 31) & _MAGNITUDE))


@triton.jit
def from_order(order):
    """The float32 of an int32 from `order`."""
    return (order ^ ((order >> 31) & _MAGNITUDE)).to(tl.float32, bitcast=True)


@triton.jit
def keys(x, ids):
    """int64 keys of scores float32 and their ids, int32 or int64, of one shape."""
    return (order(x).to(tl.int64) << 32) | (ids.to(tl.int64) ^ _LOW)


@triton.jit
def key_id(key):
    """The id, int64, in a key."""
    return (key & _LOW) ^ _LOW


@triton.jit
def key_score(key):
    """The score, float32, in a key."""
    return from_order((key >> 32).to(tl.int32))
