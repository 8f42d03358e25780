"""Scores as integers inside a kernel, so that one maximum finds the best score and its lowest id.

The upper half of a key is a float32, mapped so that integers compare like the floats; the lower half is the
complement of an id below 2^32. No two ids have the same key.
"""

import triton
import triton.language as tl

NOTHING = tl.constexpr(-(2**63))  # below the key of every score

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)  # all bits of an int32 but the sign
_LOW = tl.constexpr(0xFFFFFFFF)


@triton.jit
def order(x):
    """Map float32 to int32 in the same order: -inf smallest, both zeros equal, NaN largest."""
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x != x, _MAGNITUDE, bits ^ ((bits >> 31) & _MAGNITUDE))


@triton.jit
def from_order(order):
    """Return the float32 of an int32 from `order`."""
    return (order ^ ((order >> 31) & _MAGNITUDE)).to(tl.float32, bitcast=True)


@triton.jit
def keys(x, ids):
    """Return int64 keys of float32 scores and their ids, int32 or int64, of the same shape."""
    return (order(x).to(tl.int64) << 32) | (ids.to(tl.int64) ^ _LOW)


@triton.jit
def key_id(key):
    """Return the int64 id in a key."""
    return (key & _LOW) ^ _LOW


@triton.jit
def key_score(key):
    """Return the float32 score in a key."""
    return from_order((key >> 32).to(tl.int32))
