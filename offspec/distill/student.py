"""A head that is being trained: what every kind of it can do.

Letters: M rows of a lesson, n rows at which a guess is made, H hidden size, V vocabulary, D depths.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from offspec.distill.batch import Lesson
from offspec.distill.embed_head import Columns, Ends


@dataclass(frozen=True, slots=True)
class Published:
    """A head as it is published: config.json, and the tensors of one safetensors file by name."""

    config: dict[str, Any]
    file: str
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Teacher:
    """What the target says at the rows of one lesson: odds [M, C + R] over the columns of a step."""

    ends: Ends
    columns: Columns
    rows: torch.Tensor
    odds: torch.Tensor

    @classmethod
    def of(cls, ends: Ends, columns: Columns, lesson: Lesson) -> "Teacher":
        rows = ends.rows(columns)
        with torch.no_grad():
            logits = ends.logits(lesson.states, rows, columns.token)
            return cls(ends, columns, rows, (logits + columns.weight).softmax(-1))

    def loss(self, logits: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Cross-entropy of a pupil's logits [n, C + R] with the odds at these rows of the lesson [n]."""
        return torch.nn.functional.cross_entropy(logits + self.columns.weight, self.odds[at])

    def common_loss(self, logits: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """The same of a pupil that knows the common tokens alone: logits [n, C]."""
        odds = self.odds[at, : logits.shape[1]]
        return torch.nn.functional.cross_entropy(logits, odds / odds.sum(-1, keepdim=True).clamp_min(1e-6))


@dataclass(frozen=True, slots=True)
class Scores:
    """Logits [n, V] of the guesses at one depth; truth [n]: the rows of the lesson that hold the token."""

    logits: torch.Tensor
    truth: torch.Tensor


class Pupil(Protocol):
    """kind: what `--kind` calls it; depth: D, tokens it guesses in a row; whole: its lessons hold the
    questions, too; module: what is trained.
    """

    kind: str
    depth: int
    whole: bool

    @property
    def module(self) -> torch.nn.Module: ...

    def losses(self, lesson: Lesson, teacher: Teacher) -> list[torch.Tensor]:
        """The loss of each depth; a depth that no row reaches is left out."""

    def guesses(self, lesson: Lesson) -> Iterator[Scores]:
        """By depth: what it guesses, given the lesson's own tokens up to there."""

    def published(self, name: str) -> Published:
        """As others load it. name: of the target."""
