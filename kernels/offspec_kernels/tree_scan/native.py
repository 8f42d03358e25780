"""The recurrence in compiled loops, for CPUs: states are advanced row by row, a few columns at a time.

Columns of a state do not know of each other, so a task is some columns of one head, few enough to stay in a
core's nearest cache on their way down the tree. Numbers are computed in one order, whatever rows there are.

Letters: T rows, S steps, H heads, G heads of keys, D numbers of a key, E of a value, P places.
"""

from functools import partial

import numpy as np
from torch import Tensor

from offspec_kernels.dequant.native import Array, compiled
from offspec_kernels.dequant.threads import spread
from offspec_kernels.tree_attention.native import LOG2E, exp2
from offspec_kernels.tree_scan.order import WalkOrder

COLUMNS = 32  # of a state that are advanced together: 16 KB where a key has 128 numbers

_fused = partial(compiled, allow=frozenset({"contract"}))


def tree_scan(
    query: Tensor | None, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None,
    rates: Tensor | None, state: Tensor, order: WalkOrder, out: Tensor | None, final: Tensor | None,
) -> None:  # fmt: skip
    """See the package. All float32 and contiguous."""
    heads, size, width = state.shape
    nothing = np.empty((0, 0, 0), np.float32)
    arrays = (
        nothing if query is None or out is None else query.numpy(),
        key.numpy(),
        value.numpy(),
        decay.view(len(decay), heads, -1).numpy(),
        np.empty((0, 0), np.float32) if beta is None else beta.numpy(),
        nothing if rates is None else rates.numpy(),
        state.numpy(),
        order.row, order.source, order.target, order.places,
        nothing if out is None else out.numpy(),
        nothing if final is None else final.numpy(),
    )  # fmt: skip

    def work(start: int, end: int) -> None:
        _scan(*arrays, start, end)

    spread(work, heads * -(-width // COLUMNS), len(order.row) * heads * size * width // 16)


@compiled
def _scan(
    query: Array, key: Array, value: Array, decay: Array, beta: Array, rates: Array, state: Array,
    rows: Array, source: Array, target: Array, places: int, out: Array, final: Array,
    start: int, end: int,
) -> None:  # fmt: skip
    """Tasks [start, end), of which each head has as many as it has blocks of columns."""
    heads, size, width = state.shape
    blocks, group = (width + COLUMNS - 1) // COLUMNS, heads // key.shape[1]
    states = np.zeros((places, size * COLUMNS), np.float32)
    change, said = np.zeros(COLUMNS, np.float32), np.zeros(COLUMNS, np.float32)
    keep = np.empty(size, np.float32)
    for task in range(start, end):
        head, first = task // blocks, task % blocks * COLUMNS
        count = min(COLUMNS, width - first)
        for d in range(size):
            states[0, d * COLUMNS : d * COLUMNS + count] = state[head, d, first : first + count]
        for step in range(len(rows)):
            row = rows[step]
            now, k = states[target[step]], key[row, head // group]
            if source[step] != target[step]:
                now[:] = states[source[step]]
            if len(rates):
                _decay_each(now, decay[row, head, first:], rates[head], first, count)
                keep[:] = np.float32(1.0)
            else:
                _powers(decay[row, head], keep)
            change[:count] = value[row, head, first : first + count]
            if len(beta):
                _correct(now, k, keep, change, beta[row, head], said)
            elif not len(rates):
                _decay(now, keep)
            if len(query):
                _advance(now, k, change, query[row, head // group], said)
                out[row, head, first : first + count] = said[:count]
            else:
                _add(now, k, change)
        if len(final):
            last = target[-1] if len(rows) else 0
            for d in range(size):
                final[head, d, first : first + count] = states[last, d * COLUMNS : d * COLUMNS + count]


@_fused
def _powers(decay: Array, keep: Array) -> None:
    """e^decay, one number for all of a key or one for each of its numbers."""
    if len(decay) == 1:
        keep[:] = exp2(decay[0] * np.float32(LOG2E))
    else:
        for d in range(len(keep)):
            keep[d] = exp2(decay[d] * np.float32(LOG2E))


# Four numbers of a key at a time, and one after the other even so.
@_fused
def _correct(state: Array, key: Array, keep: Array, change: Array, beta: float, found: Array) -> None:
    """Decay a state; a value becomes beta times what the state lacks of it."""
    for e in range(COLUMNS):
        found[e] = np.float32(0.0)
    whole = len(key) // 4 * 4
    for d in range(0, whole, 4):
        lines = state[d * COLUMNS : (d + 4) * COLUMNS]
        a, b, c, g = keep[d], keep[d + 1], keep[d + 2], keep[d + 3]
        i, j, k, m = key[d], key[d + 1], key[d + 2], key[d + 3]
        for e in range(COLUMNS):
            w, x = lines[e] * a, lines[COLUMNS + e] * b
            y, z = lines[2 * COLUMNS + e] * c, lines[3 * COLUMNS + e] * g
            lines[e], lines[COLUMNS + e], lines[2 * COLUMNS + e], lines[3 * COLUMNS + e] = w, x, y, z
            found[e] = found[e] + w * i + x * j + y * k + z * m
    for d in range(whole, len(key)):
        line = state[d * COLUMNS : (d + 1) * COLUMNS]
        for e in range(COLUMNS):
            line[e] = line[e] * keep[d]
            found[e] = found[e] + line[e] * key[d]
    for e in range(COLUMNS):
        change[e] = (change[e] - found[e]) * beta


@_fused
def _decay(state: Array, keep: Array) -> None:
    for d in range(len(keep)):
        line, a = state[d * COLUMNS : (d + 1) * COLUMNS], keep[d]
        for e in range(COLUMNS):
            line[e] = line[e] * a


@_fused
def _decay_each(state: Array, step: Array, rates: Array, first: int, count: int) -> None:
    for d in range(len(rates)):
        line, rate = state[d * COLUMNS : d * COLUMNS + count], rates[d, first : first + count]
        for e in range(count):
            line[e] = line[e] * exp2(step[e] * rate[e] * np.float32(LOG2E))


@_fused
def _advance(state: Array, key: Array, change: Array, query: Array, said: Array) -> None:
    """Add a key's and a value's product to a state, and ask it."""
    for e in range(COLUMNS):
        said[e] = np.float32(0.0)
    whole = len(key) // 4 * 4
    for d in range(0, whole, 4):
        lines = state[d * COLUMNS : (d + 4) * COLUMNS]
        a, b, c, g = query[d], query[d + 1], query[d + 2], query[d + 3]
        i, j, k, m = key[d], key[d + 1], key[d + 2], key[d + 3]
        for e in range(COLUMNS):
            u = change[e]
            w, x = lines[e] + i * u, lines[COLUMNS + e] + j * u
            y, z = lines[2 * COLUMNS + e] + k * u, lines[3 * COLUMNS + e] + m * u
            lines[e], lines[COLUMNS + e], lines[2 * COLUMNS + e], lines[3 * COLUMNS + e] = w, x, y, z
            said[e] = said[e] + w * a + x * b + y * c + z * g
    for d in range(whole, len(key)):
        line = state[d * COLUMNS : (d + 1) * COLUMNS]
        for e in range(COLUMNS):
            line[e] = line[e] + key[d] * change[e]
            said[e] = said[e] + line[e] * query[d]


@_fused
def _add(state: Array, key: Array, change: Array) -> None:
    for d in range(len(key)):
        line, k = state[d * COLUMNS : (d + 1) * COLUMNS], key[d]
        for e in range(COLUMNS):
            line[e] = line[e] + k * change[e]
