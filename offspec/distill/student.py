"""A head that is being trained: what every kind of it can do.

Letters: M rows of a lesson, n rows at which a guess is made, H hidden size, V vocabulary, D depths.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from offspec.checkpoint.folder import CONFIG
from offspec.checkpoint.write import SafetensorsWriter
from offspec.core.files import new_folder, write_file
from offspec.distill.batch import Lesson
from offspec.distill.embed_head import Columns, Ends


@dataclass(frozen=True, slots=True)
class Published:
    """A head as it is published: config.json, and the tensors of one safetensors file by name."""

    config: dict[str, Any]
    file: str
    tensors: dict[str, torch.Tensor]

    def write(self, out: Path) -> int:
        """Make the folder, whole or not at all. Returns the bytes of its tensors. Raises DiskFullError."""
        tensors = {name: _stored(tensor) for name, tensor in self.tensors.items()}
        kinds = {torch.bfloat16: "BF16", torch.int64: "I64", torch.bool: "BOOL"}
        entries = [(name, kinds[value.dtype], tuple(value.shape)) for name, value in tensors.items()]
        with new_folder(out) as partial:
            with SafetensorsWriter(partial / self.file, entries) as writer:
                for name, value in tensors.items():
                    writer.write(name, value)
            write_file(partial / CONFIG, (json.dumps(self.config, indent=2) + "\n").encode())
        return sum(value.nbytes for value in tensors.values())


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    value = tensor.detach().cpu().contiguous()
    return value.to(torch.bfloat16) if value.is_floating_point() else value


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
