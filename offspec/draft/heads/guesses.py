"""What heads that look at one state have in common: that state, and guesses row by row.

Letters: W nodes, K children of each, H hidden size.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
import torch

from offspec.draft.base import Children, Features, Wants
from offspec.model.cache import TreeCache


class LastState:
    """The target's final hidden state at the last position it has seen."""

    def __init__(self) -> None:
        self._position = -1
        self._state = torch.empty(0)

    def observe(self, features: Features) -> None:
        if len(features):
            self._position = features.start + len(features) - 1
            self._state = features.last[-1].clone()  # the rest of them can go

    def rewind(self, length: int) -> None:
        if self._position >= length:
            self._position = -1

    def before(self, root: int) -> torch.Tensor | None:
        """The state [H] of the position before that of the root, where it is known."""
        return self._state if 0 <= self._position == root - 1 else None


class LastStateDrafter:
    """What a drafter is that keeps nothing but that state from tree to tree."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.between: Callable[[], None] | None = None
        self._last = LastState()

    def fork(self, target: TreeCache) -> Self:
        """See `Drafter.fork`."""
        twin = copy.copy(self)
        twin._last = LastState()
        return twin

    @property
    def wants(self) -> Wants:
        return Wants(last=True)

    def commit(self, nodes: Sequence[int]) -> None:
        pass  # there is no cache

    def observe(self, features: Features) -> None:
        self._last.observe(features)

    def adopt(self) -> None:
        pass

    def rewind(self, length: int) -> None:
        self._last.rewind(length)


def nothing(count: int) -> Children:
    """No children of `count` nodes."""
    return Children(
        token=np.empty((count, 0), np.int64),
        log_prob=np.empty((count, 0), np.float32),
        x=np.empty((count, 0), np.float32),
    )


def arranged(found: Children, rows: Sequence[int]) -> Children:
    """The children of W nodes, of which each has one of the rows that were found, or none: -1."""
    if not len(found.token):
        return nothing(len(rows))
    places = np.array(rows, dtype=np.int64)
    log_prob = found.log_prob[places]
    log_prob[places < 0] = -np.inf
    drawn = None if found.drawn is None else found.drawn[torch.from_numpy(places)]
    return Children(found.token[places], log_prob, found.x[places], drawn)
