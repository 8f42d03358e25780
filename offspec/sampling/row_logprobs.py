"""Log-probabilities of given tokens at many rows of final states, computed for a few rows at a time.

Letters: T rows, n rows at a time, H hidden size, v tokens of a vocabulary block, k likeliest tokens.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offspec.core.events import TokenLogprobs
from offspec_kernels.transfer import download

_TOGETHER = 16  # rows whose logits are in memory; all rows of a long prompt would take gigabytes


class RowLogprobs:
    """Log-probability of the token after each row, and the likeliest tokens there, before any rule.

    The vocabulary may be split into blocks, which are added once each with `add`.

    Args:
        states: Final states [T, H].
        tokens: Id of the token after each row.
        top: Number of likeliest tokens for each row.
    """

    def __init__(self, states: Tensor, tokens: Sequence[int], top: int) -> None:
        self._states, self._top = states, top
        rows, device = len(states), states.device
        self._tokens = torch.tensor(tokens, device=device)
        self._total = torch.full((rows,), -math.inf, device=device)  # log of the sum of exp(logits)
        self._own = torch.full((rows,), -math.inf, device=device)
        self._values = torch.full((rows, top), -math.inf, device=device)
        self._ids = torch.zeros((rows, top), dtype=torch.long, device=device)

    def add(self, project: Callable[[Tensor], Tensor], start: int = 0) -> None:
        """Add the vocabulary block that begins at token `start`. project: maps [n, H] to logits [n, v]."""
        for at in range(0, len(self._states), _TOGETHER):
            rows = slice(at, at + _TOGETHER)
            logits = project(self._states[rows]).float()
            self._total[rows] = torch.logaddexp(self._total[rows], logits.logsumexp(-1))
            place = self._tokens[rows, None] - start
            own = logits.gather(1, place.clamp(0, logits.shape[1] - 1))
            inside = (place >= 0) & (place < logits.shape[1])
            self._own[rows] = torch.where(inside, own, self._own[rows, None])[:, 0]
            values, ids = logits.topk(min(self._top, logits.shape[1]))
            values = torch.cat([self._values[rows], values], 1)
            ids = torch.cat([self._ids[rows], ids + start], 1)
            self._values[rows], order = values.topk(self._top)
            self._ids[rows] = ids.gather(1, order)

    def results(self) -> list[TokenLogprobs]:
        """Return the log-probabilities after all blocks were added."""
        values = torch.cat([self._own[:, None], self._values], 1) - self._total[:, None]
        ids = torch.cat([self._tokens[:, None], self._ids], 1)
        listed = zip(*(part.tolist() for part in download(ids, values)), strict=True)
        return [
            TokenLogprobs(
                token, own, tuple(pair for pair in zip(top, known, strict=True) if pair[1] > -math.inf)
            )
            for (token, *top), (own, *known) in listed
        ]


class PromptScorer:
    """Log-probabilities of a prompt's own tokens, collected from the passes of its prefill.

    top: number of likeliest tokens at each position.
    """

    def __init__(self, prompt: Sequence[int], top: int) -> None:
        self._prompt, self._top = prompt, top
        self._found = list[TokenLogprobs]()  # from the second token on
        self._rows: RowLogprobs | None = None

    @property
    def tokens(self) -> tuple[TokenLogprobs | None, ...]:
        """Log-probabilities of each token so far; None for the first, which has no predecessor."""
        return (None, *self._found)

    def rows(self, start: int, states: Tensor) -> RowLogprobs | None:
        """Return the rows of a pass that precede prompt tokens, or None if there are none.

        start: position of the first state. Call `collect` when the pass has computed the rows.
        """
        following = self._prompt[start + 1 : start + 1 + len(states)]
        self._rows = RowLogprobs(states[: len(following)], following, self._top) if following else None
        del self._found[start:]  # from a pass that failed later
        return self._rows

    def collect(self) -> None:
        """Store the results of a pass."""
        if self._rows is not None:
            self._found += self._rows.results()
            self._rows = None
