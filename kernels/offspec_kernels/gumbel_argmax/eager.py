"""torch's own operations, a row at a time: a row stays in a core's cache from one step to the next.

The largest of a row is looked for in the block of 128 that has it: on a CPU torch finds a maximum at the
speed of memory, and its place ten times more slowly.
"""

import math

import torch
from torch import Tensor

from offspec_kernels.gumbel_argmax.rows import Picks, Work, keep_above

_BLOCK = 128


def pick(work: Work) -> Picks:
    count, size = work.logits.shape
    room = torch.empty(-(-size // _BLOCK) * _BLOCK, device=work.logits.device)
    room[size:] = -math.inf
    found: dict[int, Picks] = {}
    for position, rows in work.rows_by_position():
        noise = work.noise_row(position)
        for row in rows:
            _score(work, row, noise, out=room[:size])
            found[row] = _two_largest(room)
    if count == 1:
        return found[0]  # what a walk asks for, again and again
    return Picks(*(torch.cat(column) for column in zip(*(found[row] for row in range(count)), strict=True)))


def _score(work: Work, row: int, noise: Tensor | None, out: Tensor) -> None:
    """x of one row, [V] float32."""
    out.copy_(work.logits[row])
    if work.temperature != 1.0:
        # By a tensor, since CUDA divides by a number by multiplying with its inverse, which rounds twice.
        out.div_(torch.full((), work.temperature, device=out.device))
    if work.least is not None:
        keep_above(out, work.least[row], None if work.last_tie is None else work.last_tie[row])
    if noise is not None:
        out.add_(noise)


def _two_largest(row: Tensor) -> Picks:
    """Of one row [n blocks], which loses its largest: [1] each."""
    blocks = row.view(-1, _BLOCK)
    maxima = blocks.amax(dim=1)  # [n]
    block = maxima.argmax(dim=0, keepdim=True)  # documented to be the first of several maxima
    token = block * _BLOCK + blocks[block].argmax(dim=1)
    best = maxima.gather(0, block)
    row.scatter_(0, token, -math.inf)
    return Picks(token, best, row.amax(dim=0, keepdim=True))
