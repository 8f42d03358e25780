"""The largest of each row of logits, with temperature, filters and Gumbel noise: how a token is sampled."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offspec_kernels.backend import Backend, choose_backend
from offspec_kernels.checks import check_logits, check_noise, check_scale, check_tensor
from offspec_kernels.errors import ArgumentError
from offspec_kernels.gumbel_argmax.rows import Picks, Work, empty_picks, keep_above

_BLOCK = 128  # columns of a row that are searched by their maximum first


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
    check_logits(logits)
    if isinstance(positions, Tensor):
        raise ArgumentError("positions", "must be a sequence of numbers, not a tensor")
    check_noise(logits, seed, positions, noise, table)
    check_scale("temperature", temperature)
    if last_tie is not None and least is None:
        raise ArgumentError("last_tie", "it cuts ties with `least`, and there is no `least`")
    for name, column, dtype in (("least", least, torch.float32), ("last_tie", last_tie, torch.int64)):
        if column is not None:
            check_tensor(name, column, [len(logits)], [dtype], logits.device)
    chosen = choose_backend(logits.device, path)
    if not len(logits):
        return empty_picks(0, logits.device)
    places = None if seed is None else positions
    work = Work(logits, seed, places, float(temperature), least, last_tie, noise, table)
    with torch.no_grad():
        if chosen == "triton":
            from offspec_kernels.gumbel_argmax.triton import pick

            return pick(work)
        return _eager_picks(work) if chosen == "eager" else _reference_picks(work)


def _reference_picks(work: Work) -> Picks:
    """In float64, rounded to float32 where the scores are defined so, and a stable sort of each row.

    Scratch: six rows [V] of float64 or int64.
    """
    picks = [_reference_pick(work, row) for row in range(len(work.logits))]
    tokens, best, second = zip(*picks, strict=True)
    device = work.logits.device
    return Picks(
        torch.tensor(tokens, dtype=torch.int64, device=device),
        torch.tensor(best, dtype=torch.float32, device=device),
        torch.tensor(second, dtype=torch.float32, device=device),
    )


def _reference_pick(work: Work, row: int) -> tuple[int, float, float]:
    temperature = torch.tensor(work.temperature, dtype=torch.float32).double()
    scores = _rounded(work.logits[row].double() / temperature)
    ids = torch.arange(len(scores), device=scores.device)
    if work.least is not None:
        least = work.least[row].double()
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
    """float64 as float32 would hold it; of one operation on two float32 this is what float32 would give."""
    return exact.float().double()


def _eager_picks(work: Work) -> Picks:
    """torch's own operations, a row at a time: it stays in a core's cache from one step to the next."""
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
    """Of one row [n blocks], which loses its largest: [1] each.

    The largest is looked for in the block that has it: on a CPU torch finds a maximum at the speed of memory,
    and its place ten times more slowly.
    """
    blocks = row.view(-1, _BLOCK)
    maxima = blocks.amax(dim=1)  # [n]
    block = maxima.argmax(dim=0, keepdim=True)  # documented to be the first of several maxima
    token = block * _BLOCK + blocks[block].argmax(dim=1)
    best = maxima.gather(0, block)
    row.scatter_(0, token, -math.inf)
    return Picks(token, best, row.amax(dim=0, keepdim=True))


__all__ = ["Picks", "gumbel_argmax", "keep_above"]
