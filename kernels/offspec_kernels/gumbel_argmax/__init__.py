"""The largest of each row of logits, with temperature, filters and Gumbel noise: how a token is sampled."""

from collections.abc import Callable, Sequence

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
from offspec_kernels.gumbel_argmax.rows import Picks, Work, empty_picks, keep_above


def gumbel_argmax(
    logits: Tensor,
    *,
    seed: int | None = None,
    positions: Sequence[int] | None = None,
    temperature: float = 1.0,
    least: Tensor | None = None,
    last_tie: Tensor | None = None,
    noise: Callable[[int], Tensor] | None = None,
    table: Tensor | None = None,
    path: Backend | None = None,
) -> Picks:
    """The token with the largest x = logits / temperature + g(seed, position, token) of each row, filtered.

    Scores are float32: logits are divided, unless temperature is 1, and the noise is added, each step rounded
    once.

    Args:
        logits: [N, V] float32, bfloat16 or float16, last dimension contiguous.
        seed: In [0, 2^64), the key of the noise (`offspec_kernels.noise`). None: no noise, the greedy token.
        positions: [N], absolute positions that the noise is for; needed with a seed.
        temperature: Divides the logits, 1 by default.
        least: [N] float32: scores (before noise) below it are excluded; none by default.
        last_tie: [N] int64: of scores equal to `least`, ids above it are excluded; none by default.
        noise: noise(position) gives the row [V] float32 of a position, equal to what would be made; the
            triton path reads `table`.
        table: [S, V] float32, contiguous: row p mod S is that of position p, for all of `positions`. Where it
            is None the triton path makes noise of its own.
        path: Backend to use, by default `choose_backend`'s.

    Returns:
        token [N] int64, the lowest id among equals; best [N] float32, its x; second [N] float32, the largest
        x of the other tokens, -inf where there is none. In a row with a NaN, token is its first NaN and best
        is NaN.

    Raises:
        ArgumentError: Names the argument that is wrong.
        PathError: `path` cannot run here.

    Scratch: eager, two rows [V] float32 and, filtered, a bool one, whatever N is; triton, 16 bytes for each
    row and 1024 tokens of it.
    """
    places = _checked(logits, seed, positions, noise)
    work = Work(logits, seed, places, float(temperature), least, last_tie, noise, table)
    _check(work)
    check_table(logits, seed, table)
    chosen = choose_backend(logits.device, path)
    if not len(logits):
        return empty_picks(0, logits.device)
    if chosen == "triton":
        from offspec_kernels.gumbel_argmax.triton import pick
    elif chosen == "eager":
        from offspec_kernels.gumbel_argmax.eager import pick
    else:
        from offspec_kernels.gumbel_argmax.reference import pick
    with torch.no_grad():
        return pick(work)


def _checked(
    logits: Tensor,
    seed: int | None,
    positions: Sequence[int] | None,
    noise: Callable[[int], Tensor] | None,
) -> Sequence[int] | None:
    """The positions whose noise is added, None for none."""
    check_logits(logits)
    check_noise(len(logits), seed, positions)
    check_rows_of_noise(seed, noise)
    return None if seed is None else positions


def _check(work: Work) -> None:
    logits = work.logits
    check_scale("temperature", work.temperature)
    if work.last_tie is not None and work.least is None:
        raise ArgumentError("last_tie", "it cuts ties with `least`, and there is no `least`")
    for name, column, dtype in (
        ("least", work.least, torch.float32),
        ("last_tie", work.last_tie, torch.int64),
    ):
        if column is not None:
            check_shape(name, column, [len(logits)])
            check_dtype(name, column, [dtype])
            check_device(name, column, logits.device)
            check_rows(name, column)


__all__ = ["Picks", "gumbel_argmax", "keep_above"]
