"""The likeliest children of a draft's nodes: noise, log-softmax and the largest few of each row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from offspec_kernels.backend import Backend, choose_backend
from offspec_kernels.checks import (
    check_device,
    check_dtype,
    check_logits,
    check_noise,
    check_rows,
    check_rows_of_noise,
    check_scale,
    check_shape,
    check_table,
)
from offspec_kernels.errors import ArgumentError
from offspec_kernels.noise import gumbel_row
from offspec_kernels.topk_children.layout import BLOCK

MOST = 64  # children that one program of the kernel finds


@dataclass(frozen=True, slots=True)
class TopChildren:
    """K children of W nodes, best first, the lowest id first among equals; [W, K] each.

    token int64; relative float32, x of the child less the largest x of the row; log_prob float32, its
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
    room: Tensor | None = None,
    path: Backend | None = None,
) -> TopChildren:
    """The K = `count` tokens of each row with the largest x = logits + g(seed, position, token).

    Noise is added in float32. Children with -inf come last, and a row with a NaN has log-probabilities of
    NaN.

    Args:
        logits: [W, V] float32, bfloat16 or float16, penalised and divided by the temperature; rows may be
            apart, columns are contiguous.
        count: K; more than 64 take the eager path.
        seed: In [0, 2^64), the key of the noise (`offspec_kernels.noise`). None: no noise.
        positions: [W], those of the children: a sequence, or int64 on the device of logits.
        tau: Temperature of the log-probabilities that are returned, 1 by default.
        noise: noise(position) gives the row [V] float32 of a position, equal to g, where the caller keeps
            such rows; the triton path reads `table`.
        table: [S, V] float32, contiguous: row p mod S is that of position p, for all of `positions`. Where it
            is None the triton path makes noise of its own.
        room: [W, V rounded up to whole blocks of 128] float32, contiguous: scratch of the eager path, made by
            default. logits may lie in its first V columns.
        path: Backend to use, by default `choose_backend`'s.

    Raises:
        ArgumentError: Names the argument that is wrong.
        PathError: `path` cannot run here.

    Scratch: eager, the room where none is given, 128 W K times 40 bytes (W V times where V < 256 K), and a
    row [V] float32 for each position where noise is made; triton, 8 bytes a row and block of 128; reference,
    several W V float64. The triton path reads the logits once, and 128 K of each row a second time; where
    positions lie on the device it never waits for the host, so a CUDA graph can capture it.
    """
    _check(logits, count, tau, room)
    _check_noise(logits, seed, positions, noise)
    check_table(logits, seed, table)
    chosen = choose_backend(logits.device, path)
    if chosen == "triton" and count > MOST:
        chosen = "eager"
    with torch.no_grad():
        if chosen == "triton":
            from offspec_kernels.topk_children.triton import children

            return TopChildren(*children(logits, count, seed, positions, tau, table))
        rows = _rows(logits, seed, positions, noise)
        if chosen == "eager":
            from offspec_kernels.topk_children import eager

            return TopChildren(*eager.children(logits, count, rows, tau, room))
        from offspec_kernels.topk_children import reference

        return TopChildren(*reference.children(logits, count, rows, tau))


def _rows(
    logits: Tensor,
    seed: int | None,
    positions: Sequence[int] | Tensor | None,
    noise: Callable[[int], Tensor] | None,
) -> list[Tensor] | None:
    """The noise [V] of each row, None for none; rows at the same position share theirs."""
    if seed is None or positions is None or not len(logits):
        return None
    places: Sequence[int] = positions.tolist() if isinstance(positions, Tensor) else positions
    check_noise(len(logits), seed, places)
    make = noise or partial(gumbel_row, seed, size=logits.shape[1], device=logits.device)
    made = {place: make(place) for place in set(places)}
    return [made[place] for place in places]


def _check(logits: Tensor, count: int, tau: float, room: Tensor | None) -> None:
    check_logits(logits)
    width, size = logits.shape
    if not 0 < count <= size:
        raise ArgumentError("count", f"must be 1 to {size}, the width of the logits, not {count}")
    check_scale("tau", tau)
    if room is not None:
        check_shape("room", room, [width, -(-size // BLOCK) * BLOCK])
        check_dtype("room", room, [torch.float32])
        check_device("room", room, logits.device)
        if not room.is_contiguous():
            raise ArgumentError("room", "it must be contiguous")


def _check_noise(
    logits: Tensor,
    seed: int | None,
    positions: Sequence[int] | Tensor | None,
    noise: Callable[[int], Tensor] | None,
) -> None:
    check_rows_of_noise(seed, noise)
    if not isinstance(positions, Tensor):
        check_noise(len(logits), seed, positions)
        return
    check_noise(len(logits), seed, range(len(logits)))  # their values are left on the device
    check_shape("positions", positions, [len(logits)])
    check_dtype("positions", positions, [torch.int64])
    check_device("positions", positions, logits.device)
    check_rows("positions", positions)
