"""Drafters based on the target's last state: that state, and children looked up by row.

Letters: W nodes, K children of each, H hidden size.
"""

import copy
from collections.abc import Sequence
from typing import Self

import numpy as np
import torch

from offspec.draft.base import Children, Drafter, Features
from offspec.draft.heads.base import LAST
from offspec.model.cache import TreeCache


class LastStateDrafter(Drafter):
    """Keeps the target's final hidden state at the last position observed, and nothing else of a text."""

    required_states = LAST

    def __init__(self, name: str) -> None:
        self.name = name
        self._forget()

    def _forget(self) -> None:
        self._root = 0
        self._position, self._state = -1, torch.empty(0)
        self._of_tree: dict[int, torch.Tensor] = {}  # results computed for this tree

    def fork(self, target: TreeCache) -> Self:
        twin = copy.copy(self)
        twin._forget()
        return twin

    def start(self, ids: Sequence[int]) -> None:
        self._root = len(ids) - 1
        self._of_tree.clear()

    def observe(self, features: Features) -> None:
        if len(features):
            self._position = features.start + len(features) - 1
            self._state = features.last[-1].clone()  # the other rows can be freed

    def rewind(self, length: int) -> None:
        if self._position >= length:
            self._position = -1

    def _before_root(self) -> torch.Tensor | None:
        """Return the state [H] of the position before the root, if it is known."""
        return self._state if 0 <= self._position == self._root - 1 else None

    def close(self) -> None:
        self._of_tree.clear()


def gather_children(found: Children, rows: Sequence[int]) -> Children:
    """Return the children of W nodes, each of which has one of the rows in `found`, or none: -1."""
    if not len(found.token):
        return Children.none(len(rows))
    places = np.array(rows, dtype=np.int64)
    log_prob = found.log_prob[places]
    log_prob[places < 0] = -np.inf
    drawn = None if found.drawn_scores is None else found.drawn_scores[torch.from_numpy(places)]
    return Children(found.token[places], log_prob, found.x[places], drawn)
