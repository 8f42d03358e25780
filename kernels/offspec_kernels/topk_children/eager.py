"""The likeliest children in torch's operations, worked out in one piece of memory [W, V]."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from offspec_kernels.topk_children.layout import BLOCK

_LOW = 0xFFFFFFFF


def children(
    logits: Tensor,
    count: int,
    noise: Sequence[Tensor] | None,
    tau: float,
    room: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """token, relative and log_prob of `topk_children`; noise: the row [V] to add to each."""
    width, size = logits.shape
    if room is None:
        room = torch.empty(width, -(-size // BLOCK) * BLOCK, device=logits.device)
    x = room[:, :size]
    if (logits.data_ptr(), logits.stride(), logits.dtype) != (x.data_ptr(), x.stride(), x.dtype):
        x.copy_(logits)
    room[:, size:] = -torch.inf  # loses against everything, and against a lower id with -inf
    if noise is not None:
        _add_noise(x, noise)
    token = _largest(room, count)
    best = room.gather(1, token)
    # What follows destroys x: the log of the sum of exp(x / tau), all relative to the best. On a CPU powers
    # of two take a third of the time of powers of e.
    total = room.sub_(best[:, :1]).mul_(math.log2(math.e) / tau).exp2_().sum(dim=1, keepdim=True).log_()
    relative = best - best[:, :1]
    return token, relative, relative / tau - total


def _add_noise(x: Tensor, noise: Sequence[Tensor]) -> None:
    if all(row is noise[0] for row in noise[1:]):
        x += noise[0]
        return
    for scores, row in zip(x, noise, strict=True):
        scores += row


def _largest(x: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest of each row of x [W, n blocks of 128], best first; [W, count].

    They lie in the `count` blocks with the largest maxima, and a maximum is found at the speed of memory,
    which sorting is not.
    """
    blocks = x.unflatten(1, (-1, BLOCK))  # [W, n, 128]
    if blocks.shape[1] < 2 * count:
        return _ranked(x, torch.arange(x.shape[1], device=x.device), count)
    number = torch.arange(blocks.shape[1], device=x.device)
    chosen = _ranked(blocks.amax(dim=2), number, count)  # [W, count]
    row = torch.arange(len(x), device=x.device)[:, None]
    some = blocks.flatten(0, 1).index_select(0, (row * len(number) + chosen).flatten())  # [W count, 128]
    ids = chosen[:, :, None] * BLOCK + torch.arange(BLOCK, device=x.device)  # [W, count, 128]
    return _ranked(some.view(ids.shape).flatten(1), ids.flatten(1), count)


def _ranked(values: Tensor, ids: Tensor, count: int) -> Tensor:
    """The ids [n] or [W, n] of the `count` largest of values [W, n] float32; of equals the lowest first.

    A value and its id make one integer, since torch.topk guarantees no order among equals.
    """
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0, its equal
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers they now compare like the floats
    order.masked_fill_(values != values, 0x7FFFFFFF)  # a NaN of either sign comes first, as it does elsewhere
    keys = order.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(ids ^ _LOW)
    return (torch.topk(keys, count, dim=1).values & _LOW) ^ _LOW
