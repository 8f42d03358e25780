"""Most likely children of a draft's nodes: noise, log-softmax and the top k of each row."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from offspec_kernels.backend import Backend, choose_backend
from offspec_kernels.checks import (
    check_contiguous,
    check_logits,
    check_noise,
    check_positions,
    check_scale,
    check_tensor,
)
from offspec_kernels.errors import ArgumentError
from offspec_kernels.noise import LOW, gumbel_row

BLOCK = 128  # columns summarized by their maximum first; as in `triton`
MOST = 64  # maximum number of children per program of the kernel


@dataclass(frozen=True, slots=True)
class TopChildren:
    """K children of W nodes, best first, lowest id first among equals; [W, K] each.

    token int64; relative float32, x of the child minus the largest x of the row; log_prob float32,
    log-softmax of x / tau.
    """

    token: Tensor
    relative: Tensor
    log_prob: Tensor


def topk_children(
    logits: Tensor,
    count: int,
    *,
    seed: int | None = None,
    positions: Sequence[int] | Tensor | None = None,
    tau: float = 1.0,
    noise: Callable[[int], Tensor] | None = None,
    table: Tensor | None = None,
    scratch: Tensor | None = None,
    path: Backend | None = None,
) -> TopChildren:
    """Return the K = `count` tokens of each row with the largest x = logits + g(seed, position, token).

    Noise is added in float32. Children with -inf come last, and a row with a NaN has log-probabilities of
    NaN.

    Args:
        logits: [W, V] float32, bfloat16 or float16, penalized and divided by the temperature; rows may have
            any stride, columns are contiguous.
        count: K; values over 64 use the eager backend.
        seed: In [0, 2^64), the key of the noise (`offspec_kernels.noise`). None: no noise.
        positions: [W], positions of the children: a sequence, or int64 on the device of logits.
        tau: Temperature of the returned log-probabilities, 1 by default.
        noise: noise(position) returns the row [V] float32 of a position, equal to g, if the caller caches
            such rows; the triton backend reads `table`.
        table: [S, V] float32, contiguous: row p mod S is the noise of position p, for all of `positions`. If
            None, the triton backend generates the noise.
        scratch: [W, V rounded up to whole blocks of 128] float32, contiguous: workspace of the eager backend,
            allocated by default. logits may be a view of its first V columns.
        path: Backend to use; by default the result of `choose_backend`.

    Raises:
        ArgumentError: An argument is invalid; the error names it.
        PathError: `path` cannot run here.

    Workspace: eager, `scratch` if not given, 128 W K times 40 bytes (W V times if V < 256 K), and a row [V]
    float32 for each position whose noise is generated; triton, 8 bytes per row and block of 128; reference,
    several W V float64. The triton backend reads the logits once, and 128 K of each row a second time. If
    positions are on the device it never blocks the host, so a CUDA graph can capture it.
    """
    check_logits(logits)
    width, size = logits.shape
    if not 0 < count <= size:
        raise ArgumentError("count", f"must be 1 to {size}, the width of the logits, not {count}")
    check_scale("tau", tau)
    if scratch is not None:
        check_tensor("scratch", scratch, [width, -(-size // BLOCK) * BLOCK], [torch.float32], logits.device)
        check_contiguous("scratch", scratch)
    check_noise(logits, seed, positions, noise, table)
    chosen = choose_backend(logits.device, path)
    if chosen == "triton" and count > MOST:
        chosen = "eager"
    with torch.no_grad():
        if chosen == "triton":
            from offspec_kernels.topk_children.triton import children

            return TopChildren(*children(logits, count, seed, positions, tau, table))
        rows = _noise_rows(logits, seed, positions, noise)
        if chosen == "eager":
            return _eager_children(logits, count, rows, tau, scratch)
        return _reference_children(logits, count, rows, tau)


def _noise_rows(
    logits: Tensor,
    seed: int | None,
    positions: Sequence[int] | Tensor | None,
    noise: Callable[[int], Tensor] | None,
) -> list[Tensor] | None:
    """Return the noise [V] of each row, None without noise; rows at the same position share it."""
    if seed is None or positions is None or not len(logits):
        return None
    places: Sequence[int] = positions.tolist() if isinstance(positions, Tensor) else positions
    check_positions(len(logits), places)
    make = noise or partial(gumbel_row, seed, size=logits.shape[1], device=logits.device)
    made = {place: make(place) for place in set(places)}
    return [made[place] for place in places]


def _reference_children(
    logits: Tensor, count: int, noise: Sequence[Tensor] | None, tau: float
) -> TopChildren:
    """Sort whole rows; noise: the row [V] to add to each."""
    x = logits.float()  # ordered in float32, rounded after adding the noise; the rest is float64
    if noise is not None:
        x = x + torch.stack(list(noise))
    best, token = (found[:, :count] for found in torch.sort(x, dim=1, descending=True, stable=True))
    exact = best.double()
    log_sum = torch.logsumexp((x.double() - exact[:, :1]) / tau, dim=1, keepdim=True)
    relative = exact - exact[:, :1]
    return TopChildren(token, relative.float(), (relative / tau - log_sum).float())


def _eager_children(
    logits: Tensor, count: int, noise: Sequence[Tensor] | None, tau: float, room: Tensor | None
) -> TopChildren:
    """Use torch operations in one workspace [W, V]; noise: the row [V] to add to each."""
    width, size = logits.shape
    if room is None:
        room = torch.empty(width, -(-size // BLOCK) * BLOCK, device=logits.device)
    x = room[:, :size]
    if (logits.data_ptr(), logits.stride(), logits.dtype) != (x.data_ptr(), x.stride(), x.dtype):
        x.copy_(logits)
    room[:, size:] = -torch.inf  # below every score, and after a lower id with -inf
    if noise is not None:
        _add_noise(x, noise)
    token = _largest(room, count)
    best = room.gather(1, token)
    # The next step overwrites x: the log of the sum of exp(x / tau), all relative to the best. On a CPU,
    # powers of two take a third of the time of powers of e.
    total = room.sub_(best[:, :1]).mul_(math.log2(math.e) / tau).exp2_().sum(dim=1, keepdim=True).log_()
    relative = best - best[:, :1]
    return TopChildren(token, relative, relative / tau - total)


def _add_noise(x: Tensor, noise: Sequence[Tensor]) -> None:
    if all(row is noise[0] for row in noise[1:]):
        x += noise[0]
        return
    for scores, row in zip(x, noise, strict=True):
        scores += row


def _largest(x: Tensor, count: int) -> Tensor:
    """Return ids of the `count` largest of each row of x [W, n blocks of 128], best first; [W, count].

    They are in the `count` blocks with the largest maxima. Finding a maximum runs at memory speed; sorting
    does not.
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
    """Return the ids [n] or [W, n] of the `count` largest of values [W, n] float32; lowest first among
    equals.

    Each value is combined with its id in one integer, since torch.topk guarantees no order among equals.
    """
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0, its equal
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers they now compare like the floats
    order.masked_fill_(
        values != values, 0x7FFFFFFF
    )  # a NaN of either sign comes first, as in the other backends
    keys = order.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(ids ^ LOW)
    return (torch.topk(keys, count, dim=1).values & LOW) ^ LOW
