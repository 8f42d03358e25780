"""The recurrence on a GPU: a program walks down the tree with some columns of one head's state in registers.

A state is written to memory only if another branch needs it. Whether rows have queries and whether the last
state is wanted is passed at run time, and no property of an argument is compiled in: sums over a key's
elements use the same order in every call.

Letters: T rows, S steps, H heads, D elements of a key, E of a value, P places.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from offspec_kernels.tree_attention.triton import LOG2E
from offspec_kernels.tree_scan.order import TraversalOrder

_STATE = 1024  # elements of a state per warp, 32 per thread
_COLUMNS = (8, 64)  # minimum and maximum columns per program

_NOT_COMPILED_IN = [
    *("query", "key", "value", "decay", "beta", "rates", "state", "steps", "waiting", "out", "final"),
    *("count", "heads", "width", "asks", "ends"),
]


@triton.jit(do_not_specialize=_NOT_COMPILED_IN)
def _tree_scan(
    query, key, value, decay, beta, rates, state, steps, waiting, out, final,
    count, heads, width, asks, ends,
    GROUP: tl.constexpr, D: tl.constexpr, PD: tl.constexpr, COLUMNS: tl.constexpr,
    BY_NUMBER: tl.constexpr, RATED: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    number = tl.arange(0, PD)
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    of_key, inside = number < D, column < width
    place = (head * D + number[:, None]) * width + column[None, :]  # in a state of all heads
    there = of_key[:, None] & inside[None, :]
    states = heads.to(tl.int64) * D * width
    now = tl.load(state + place, mask=there, other=0.0)  # [PD, COLUMNS]
    if RATED:
        rate = tl.load(rates + place, mask=there, other=0.0) * LOG2E
    first = tl.load(steps + 2)
    if first >= 0:
        tl.store(waiting + first * states + place, now, mask=there)
    for step in range(1, count + 1):
        row = tl.load(steps + step * 3).to(tl.int64)
        taken, left = tl.load(steps + step * 3 + 1), tl.load(steps + step * 3 + 2)
        if taken >= 0:
            tl.debug_barrier()  # wait until other threads have stored it
            now = tl.load(waiting + taken * states + place, mask=there, other=0.0)
        lane = row * heads + head
        of_row = (row * (heads // GROUP) + head // GROUP) * D + number
        k = tl.load(key + of_row, mask=of_key, other=0.0)[:, None]
        q = tl.load(query + of_row, mask=number < D * asks, other=0.0)[:, None]
        v = tl.load(value + lane * width + column, mask=inside, other=0.0)[None, :]
        if RATED:
            passed = tl.load(decay + lane * width + column, mask=inside, other=0.0)
            now *= tl.exp2(rate * passed[None, :])
        elif BY_NUMBER:
            now *= tl.exp2(tl.load(decay + lane * D + number, mask=of_key, other=0.0) * LOG2E)[:, None]
        else:
            now *= tl.exp2(tl.load(decay + lane) * LOG2E)
        if DELTA:
            v = (v - tl.sum(now * k, 0)[None, :]) * tl.load(beta + lane)
        now += k * v
        got = tl.sum(now * q, 0)
        tl.store(out + lane * width + column, got, mask=column < width * asks)
        if left >= 0:
            tl.debug_barrier()  # wait until other threads have loaded the old state
            tl.store(waiting + left * states + place, now, mask=there)
    tl.store(final + place, now, mask=there & (column < width * ends)[None, :])


@dataclass(frozen=True, slots=True)
class _Steps:
    """Traversal steps on the device.

    Args:
        table: [S + 1, 3] int32: the row, the place to load a state from, and the place to store it to;
            -1 if the state stays in registers. The first entry is the state before all rows.
        places: Number of places used.
    """

    table: Tensor
    places: int


def steps_of(order: TraversalOrder, device: torch.device) -> _Steps:
    """Return the steps of `order` on the device, cached in `order`."""
    if device not in order.kept:
        behind = np.concatenate([np.zeros(1, np.int32), order.target])  # each step; the first: before all
        follows = order.source == behind[:-1]  # the previous step, whose state is in registers
        table = np.full((len(behind), 3), -1, np.int32)
        table[1:, 0] = order.row
        table[1:, 1] = np.where(follows, -1, order.source)
        table[:-1, 2] = np.where(follows & (order.target != order.source), order.source, -1)
        places = int(table[:, 2].max()) + 1
        order.kept[device] = _Steps(torch.from_numpy(table).to(device), places)
    found: _Steps = order.kept[device]
    return found


def tree_scan(
    query: Tensor | None, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None,
    rates: Tensor | None, state: Tensor, order: TraversalOrder, out: Tensor | None, final: Tensor | None,
) -> None:  # fmt: skip
    """Run the package's `tree_scan` on contiguous float32 tensors."""
    heads, size, width = state.shape
    if not heads * width:
        return
    steps = steps_of(order, key.device)
    waiting = torch.empty(steps.places, *state.shape, dtype=torch.float32, device=key.device)
    padded = triton.next_power_of_2(max(size, 1))
    columns = min(max(_STATE // padded, _COLUMNS[0]), _COLUMNS[1])
    with torch.cuda.device_of(key):
        _tree_scan[(triton.cdiv(width, columns), heads)](
            key if query is None else query, key, value, decay, value if beta is None else beta,
            state if rates is None else rates, state, steps.table, waiting,
            state if out is None else out, state if final is None else final,
            len(order.row), heads, width, int(query is not None), int(final is not None),
            GROUP=heads // key.shape[1], D=size, PD=padded, COLUMNS=columns,
            BY_NUMBER=decay.dim() == 3, RATED=rates is not None, DELTA=beta is not None,
            num_warps=max(1, padded * columns // _STATE), num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip
