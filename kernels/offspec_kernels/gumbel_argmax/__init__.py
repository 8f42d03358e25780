"""Maximum of each row of logits with temperature, filters and Gumbel noise: how a token is sampled."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offspec_kernels.backend import Backend, choose_backend
from offspec_kernels.checks import check_logits, check_noise, check_scale, check_tensor
from offspec_kernels.errors import ArgumentError
from offspec_kernels.gumbel_argmax.arguments import ArgmaxArguments, ArgmaxResult, empty_result, mask_below

_BLOCK = 128  # columns of a row summarized by their maximum first


def gumbel_argmax(
    logits: Tensor,
    *,
    seed: int | None = None,
    positions: Sequence[int] | None = None,
    temperature: float = 1.0,
    min_score: Tensor | None = None,
    last_tie: Tensor | None = None,
    noise: Callable[[int], Tensor] | None = None,
    table: Tensor | None = None,
    path: Backend | None = None,
) -> ArgmaxResult:
    """Return the token with the largest x = logits / temperature + g(seed, position, token) of each row.

    Scores are float32: logits are divided unless temperature is 1, then the noise is added; each step rounds
    once.

    Args:
        logits: [N, V] float32, bfloat16 or float16, last dimension contiguous.
        seed: In [0, 2^64), the key of the noise (`offspec_kernels.noise`). None: no noise, the greedy token.
        positions: [N], absolute positions of the noise; required with a seed.
        temperature: Divides the logits, 1 by default.
        min_score: [N] float32: lower scores (before noise) are excluded; none by default.
        last_tie: [N] int64: of scores equal to `min_score`, ids above it are excluded; none by default.
        noise: noise(position) returns the noise row [V] float32 of a position, equal to the generated noise;
            the triton backend reads `table`.
        table: [S, V] float32, contiguous: row p mod S is the noise of position p, for all of `positions`. If
            None, the triton backend generates the noise.
        path: Backend to use; by default the result of `choose_backend`.

    Returns:
        token [N] int64, the lowest id among equals; best [N] float32, its x; second [N] float32, the largest
        x of the other tokens, -inf if there are none. In a row with a NaN, token is its first NaN and best
        is NaN.

    Raises:
        ArgumentError: An argument is invalid; the error names it.
        PathError: `path` cannot run here.

    Workspace: eager, two rows [V] float32 and, if filtered, a bool row, for any N; triton, 16 bytes for every
    1024 tokens of each row.
    """
    check_logits(logits)
    if isinstance(positions, Tensor):
        raise ArgumentError("positions", "must be a sequence of numbers, not a tensor")
    check_noise(logits, seed, positions, noise, table)
    check_scale("temperature", temperature)
    if last_tie is not None and min_score is None:
        raise ArgumentError("last_tie", "requires `min_score`, whose ties it cuts")
    for name, column, dtype in (("min_score", min_score, torch.float32), ("last_tie", last_tie, torch.int64)):
        if column is not None:
            check_tensor(name, column, [len(logits)], [dtype], logits.device)
    chosen = choose_backend(logits.device, path)
    if not len(logits):
        return empty_result(0, logits.device)
    places = None if seed is None else positions
    work = ArgmaxArguments(logits, seed, places, float(temperature), min_score, last_tie, noise, table)
    with torch.no_grad():
        if chosen == "triton":
            from offspec_kernels.gumbel_argmax.triton import pick

            return pick(work)
        return _eager_picks(work) if chosen == "eager" else _reference_picks(work)


def _reference_picks(work: ArgmaxArguments) -> ArgmaxResult:
    """Compute in float64, rounded to float32 as the scores' definition requires, and sort each row stably.

    Workspace: six rows [V] of float64 or int64.
    """
    picks = [_reference_pick(work, row) for row in range(len(work.logits))]
    tokens, best, second = zip(*picks, strict=True)
    device = work.logits.device
    return ArgmaxResult(
        torch.tensor(tokens, dtype=torch.int64, device=device),
        torch.tensor(best, dtype=torch.float32, device=device),
        torch.tensor(second, dtype=torch.float32, device=device),
    )


def _reference_pick(work: ArgmaxArguments, row: int) -> tuple[int, float, float]:
    temperature = torch.tensor(work.temperature, dtype=torch.float32).double()
    scores = _rounded(work.logits[row].double() / temperature)
    ids = torch.arange(len(scores), device=scores.device)
    if work.min_score is not None:
        least = work.min_score[row].double()
        last = len(scores) if work.last_tie is None else work.last_tie[row]
        out = (scores < least) | ((scores == least) & (ids > last))
        scores[out] = -math.inf
    if work.positions is not None:
        noise = work.noise_row(work.positions[row])
        assert noise is not None
        scores = _rounded(scores + noise.double())
    ranked, order = torch.sort(scores, descending=True, stable=True)  # NaN first, then lower ids first
    second = float(ranked[1]) if len(ranked) > 1 else -math.inf
    return int(order[0]), float(ranked[0]), second


def _rounded(exact: Tensor) -> Tensor:
    """Round float64 to float32 precision; after one operation on two float32 this equals float32's result."""
    return exact.float().double()


def _eager_picks(work: ArgmaxArguments) -> ArgmaxResult:
    """Use torch operations, one row at a time, so that a row stays in a core's cache between steps."""
    count, size = work.logits.shape
    room = torch.empty(-(-size // _BLOCK) * _BLOCK, device=work.logits.device)
    room[size:] = -math.inf
    found: dict[int, ArgmaxResult] = {}
    for position, rows in work.rows_by_position():
        noise = work.noise_row(position)
        for row in rows:
            _score(work, row, noise, out=room[:size])
            found[row] = _two_largest(room)
    if count == 1:
        return found[0]  # the common case during verification
    return ArgmaxResult(
        *(torch.cat(column) for column in zip(*(found[row] for row in range(count)), strict=True))
    )


def _score(work: ArgmaxArguments, row: int, noise: Tensor | None, out: Tensor) -> None:
    """Compute x of one row, [V] float32."""
    out.copy_(work.logits[row])
    if work.temperature != 1.0:
        # Divide by a tensor: CUDA divides by a number by multiplying with its inverse, which rounds twice.
        out.div_(torch.full((), work.temperature, device=out.device))
    if work.min_score is not None:
        mask_below(out, work.min_score[row], None if work.last_tie is None else work.last_tie[row])
    if noise is not None:
        out.add_(noise)


def _two_largest(row: Tensor) -> ArgmaxResult:
    """Return the two largest of one row [n blocks], [1] each; removes the largest from the row.

    Only the block that holds the maximum is searched for its index: on a CPU torch finds a maximum at memory
    speed, but an argmax ten times more slowly.
    """
    blocks = row.view(-1, _BLOCK)
    maxima = blocks.amax(dim=1)  # [n]
    block = maxima.argmax(dim=0, keepdim=True)  # documented to be the first of several maxima
    token = block * _BLOCK + blocks[block].argmax(dim=1)
    best = maxima.gather(0, block)
    row.scatter_(0, token, -math.inf)
    return ArgmaxResult(token, best, row.amax(dim=0, keepdim=True))


__all__ = ["ArgmaxResult", "gumbel_argmax", "mask_below"]
