"""Log-probabilities of a prompt's own tokens, gathered from the passes that read it."""

from collections.abc import Sequence

import torch

from offspec.core.events import TokenLogprobs
from offspec.sampling.row_logprobs import RowLogprobs


class PromptScorer:
    """Those of one prompt. top: number of likeliest tokens at each place."""

    def __init__(self, prompt: Sequence[int], top: int) -> None:
        self._prompt, self._top = prompt, top
        self._found = list[TokenLogprobs]()  # of the second token and those after it
        self._rows: RowLogprobs | None = None

    @property
    def tokens(self) -> tuple[TokenLogprobs | None, ...]:
        """One for each token so far; None for the first, which follows nothing."""
        return (None, *self._found)

    def rows(self, start: int, states: torch.Tensor) -> RowLogprobs | None:
        """The rows of a pass that tokens of the prompt follow; None if there are none.

        start: position of the first state. Call `take` when the pass has computed them.
        """
        following = self._prompt[start + 1 : start + 1 + len(states)]
        self._rows = RowLogprobs(states[: len(following)], following, self._top) if following else None
        del self._found[start:]  # from a pass that failed later
        return self._rows

    def take(self) -> None:
        """Take what a pass has computed."""
        if self._rows is not None:
            self._found += self._rows.found()
            self._rows = None
