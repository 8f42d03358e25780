"""The recurrence in compiled loops, for CPUs: states are advanced row by row, some columns at a time.

Columns of a state are independent, so a task is a few columns of one head, few enough to stay in a core's
nearest cache on the way down the tree. Numbers are computed in the same order for any number of rows.

A row's output is computed before its state, from its parent's state: with w = beta (v - S^T a k),

    o = (a S + k w^T)^T q = S^T a q + (k^T q) w

so rows without children, which are most rows of a bushy tree, read a state and write none.

Letters: S steps, H heads, D elements of a key.
"""

from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from offspec_kernels.dequant.native import Array, compiled, fused
from offspec_kernels.dequant.threads import parallel_for
from offspec_kernels.tree_attention.native import LOG2E, copy, exp2
from offspec_kernels.tree_scan.order import TraversalOrder

COLUMNS = 64  # columns of a state advanced together: 32 KB if a key has 128 elements

_summed = partial(compiled, allow=frozenset({"contract", "reassoc"}))


def tree_scan(
    query: Tensor | None, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None,
    rates: Tensor | None, state: Tensor, order: TraversalOrder, out: Tensor | None, final: Tensor | None,
) -> None:  # fmt: skip
    """Run the package's `tree_scan` on contiguous float32 tensors."""
    heads, size, width = state.shape
    nothing = np.empty((0, 0, 0), np.float32)
    arrays = (
        nothing if query is None or out is None else query.numpy(),
        key.numpy(),
        value.numpy(),
        (decay if decay.dim() == 3 else decay[:, :, None]).numpy(),
        np.empty((0, 0), np.float32) if beta is None else beta.numpy(),
        nothing if rates is None else rates.numpy(),
        state.numpy(),
        order.row, order.source, order.target, order.places,
        nothing if out is None else out.numpy(),
        nothing if final is None else final.numpy(),
    )  # fmt: skip

    def work(start: int, end: int) -> None:
        _scan(*arrays, start, end)

    parallel_for(work, heads * -(-width // COLUMNS), len(order.row) * heads * size * width // 16)


@compiled
def _scan(
    query: Array, key: Array, value: Array, decay: Array, beta: Array, rates: Array, state: Array,
    rows: Array, source: Array, target: Array, places: int, out: Array, final: Array,
    start: int, end: int,
) -> None:  # fmt: skip
    """Run tasks [start, end), one for each block of columns of each head."""
    heads, size, width = state.shape
    blocks, group = (width + COLUMNS - 1) // COLUMNS, heads // key.shape[1]
    states = np.empty((places, size * COLUMNS), np.float32)
    columns, numbers = np.empty((3, COLUMNS), np.float32), np.ones((3, size), np.float32)
    change, found, got = columns[0], columns[1], columns[2]  # unpacked, they would have strides
    keep, kept_key, kept_query = numbers[0], numbers[1], numbers[2]
    for task in range(start, end):
        head, first = task // blocks, task % blocks * COLUMNS
        count = min(COLUMNS, width - first)
        states[0, :], change[:] = np.float32(0.0), np.float32(0.0)
        for d in range(size):
            states[0, d * COLUMNS : d * COLUMNS + count] = state[head, d, first : first + count]
        for step in range(len(rows)):
            row, now = rows[step], states[source[step]]
            # Steps go down first: if a row has children, the next step is one of them.
            is_last = step + 1 == len(rows)
            goes_on = len(final) > 0 if is_last else source[step + 1] == target[step]
            if source[step] != target[step] and (goes_on or len(rates)):
                now = states[target[step]]
                copy(states[source[step]], now)
            if len(rates):
                _decay_each(now, decay[row, head, first:], rates[head], first, count)
            else:
                _powers(decay[row, head], keep)
            k = key[row, head // group]
            change[:count] = value[row, head, first : first + count]
            if len(beta):
                _times(k, keep, kept_key)
            if len(query):
                q = query[row, head // group]
                _times(q, keep, kept_query)
            if len(beta) and len(query):
                _look_twice(now, kept_key, found, kept_query, got)
            elif len(beta):
                _look(now, kept_key, found)
            elif len(query):
                _look(now, kept_query, got)
            if len(beta):
                _correct(change, found, beta[row, head])
            if len(query):
                _add(got, _dot(k, q), change)
                out[row, head, first : first + count] = got[:count]
            if goes_on:
                _advance(now, keep, k, change)
        if len(final):
            last = target[-1] if len(rows) else 0
            for d in range(size):
                final[head, d, first : first + count] = states[last, d * COLUMNS : d * COLUMNS + count]


@fused
def _powers(decay: Array, keep: Array) -> None:
    """Compute e^decay, one number for a whole key or one for each of its elements."""
    if len(decay) == 1:
        keep[:] = exp2(decay[0] * np.float32(LOG2E))
    else:
        for d in range(len(keep)):
            keep[d] = exp2(decay[d] * np.float32(LOG2E))


@fused
def _decay_each(state: Array, step: Array, rates: Array, first: int, count: int) -> None:
    for d in range(len(rates)):
        line, rate = state[d * COLUMNS : d * COLUMNS + count], rates[d, first : first + count]
        for e in range(count):
            line[e] = line[e] * exp2(step[e] * rate[e] * np.float32(LOG2E))


@fused
def _times(vector: Array, factors: Array, out: Array) -> None:
    for d in range(len(out)):
        out[d] = vector[d] * factors[d]


@_summed
def _dot(one: Array, other: Array) -> Any:
    """Return the dot product, summed in an order that depends only on the length."""
    total = np.float32(0.0)
    for d in range(len(one)):
        total += one[d] * other[d]
    return total


# Four elements of a key at a time, but in sequential order.
@fused
def _look(state: Array, key: Array, found: Array) -> None:
    """Read the value stored under a key: S^T k."""
    found[:] = np.float32(0.0)
    whole = len(key) // 4 * 4
    for d in range(0, whole, 4):
        lines = state[d * COLUMNS : (d + 4) * COLUMNS]
        i, j, k, m = key[d], key[d + 1], key[d + 2], key[d + 3]
        for e in range(COLUMNS):
            w, x, y, z = lines[e], lines[COLUMNS + e], lines[2 * COLUMNS + e], lines[3 * COLUMNS + e]
            found[e] = found[e] + w * i + x * j + y * k + z * m
    for d in range(whole, len(key)):
        line, k = state[d * COLUMNS : (d + 1) * COLUMNS], key[d]
        for e in range(COLUMNS):
            found[e] = found[e] + line[e] * k


@fused
def _look_twice(state: Array, key: Array, found: Array, query: Array, got: Array) -> None:
    """Run `_look` for two keys, bit for bit, in one read of the state."""
    found[:], got[:] = np.float32(0.0), np.float32(0.0)
    whole = len(key) // 4 * 4
    for d in range(0, whole, 4):
        lines = state[d * COLUMNS : (d + 4) * COLUMNS]
        i, j, k, m = key[d], key[d + 1], key[d + 2], key[d + 3]
        a, b, c, g = query[d], query[d + 1], query[d + 2], query[d + 3]
        for e in range(COLUMNS):
            w, x, y, z = lines[e], lines[COLUMNS + e], lines[2 * COLUMNS + e], lines[3 * COLUMNS + e]
            found[e] = found[e] + w * i + x * j + y * k + z * m
            got[e] = got[e] + w * a + x * b + y * c + z * g
    for d in range(whole, len(key)):
        line, k, q = state[d * COLUMNS : (d + 1) * COLUMNS], key[d], query[d]
        for e in range(COLUMNS):
            found[e] = found[e] + line[e] * k
            got[e] = got[e] + line[e] * q


@fused
def _correct(change: Array, found: Array, beta: float) -> None:
    """Replace a value by beta times its difference from the state's value."""
    for e in range(COLUMNS):
        change[e] = (change[e] - found[e]) * beta


@fused
def _add(out: Array, factor: float, vector: Array) -> None:
    for e in range(COLUMNS):
        out[e] = out[e] + factor * vector[e]


@fused
def _advance(state: Array, keep: Array, key: Array, change: Array) -> None:
    """Decay a state, and add the product of a key and a value."""
    for d in range(len(key)):
        line, a, k = state[d * COLUMNS : (d + 1) * COLUMNS], keep[d], key[d]
        for e in range(COLUMNS):
            line[e] = line[e] * a + k * change[e]
