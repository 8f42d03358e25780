"""A head that is being trained: the rows that it learns from in a step, and what every kind of it can do.

Letters: M rows of a lesson, n rows at which a guess is made, H hidden size, V vocabulary, D depths.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from offspec.checkpoint.folder import CONFIG
from offspec.checkpoint.json_file import write_json
from offspec.checkpoint.write import save_tensors
from offspec.core.files import new_folder
from offspec.distill.embed_head import Columns, Ends
from offspec.distill.store import Store


@dataclass(frozen=True, slots=True)
class Lesson:
    """tokens [M]; states [M, H] behind the final norm; taps, [M, H] each; left [M]: rows of the same passage
    that follow; asked [M]: whether the row says what comes next in an answer, not in a question.
    """

    tokens: torch.Tensor
    states: torch.Tensor
    taps: tuple[torch.Tensor, ...]
    left: torch.Tensor
    asked: torch.Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def before(self, count: int, behind: int = 0) -> torch.Tensor:
        """Rows [n] from whose states an answer may be guessed, and which `count + behind` others follow.

        The token behind the state is then the root of a tree: the last of a question, or one of an answer.
        """
        rows = (self.left >= max(1, count + behind)).nonzero()[:, 0]
        return rows[self.asked[rows + 1]]


def read_lesson(store: Store, numbers: Sequence[int], device: torch.device, *, whole: bool) -> Lesson:
    """Some passages. whole: their questions, too, of which else only the end is read."""
    read = [store.read(number) for number in numbers]
    starts = [0 if whole else max(0, passage.prompt - 2) for passage in read]
    left = [torch.arange(len(p) - start - 1, -1, -1) for p, start in zip(read, starts, strict=True)]
    asked = [torch.arange(start, len(p)) >= p.prompt - 1 for p, start in zip(read, starts, strict=True)]

    def joined(of: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part[start:] for part, start in zip(of, starts, strict=True)]).to(device)

    return Lesson(
        tokens=joined([passage.tokens for passage in read]),
        states=joined([passage.states for passage in read]),
        taps=tuple(joined(taps) for taps in zip(*(passage.taps for passage in read), strict=True)),
        left=torch.cat(left).to(device),
        asked=torch.cat(asked).to(device),
    )


@dataclass(frozen=True, slots=True)
class Published:
    """A head as it is published: config.json, and the tensors of one safetensors file by name."""

    config: dict[str, Any]
    file: str
    tensors: dict[str, torch.Tensor]

    def write(self, out: Path) -> int:
        """Make the folder, whole or not at all. Returns the bytes of its tensors. Raises DiskFullError."""
        tensors = {name: _stored(tensor) for name, tensor in self.tensors.items()}
        with new_folder(out) as partial:
            save_tensors(partial / self.file, tensors)
            write_json(partial / CONFIG, self.config)
        return sum(value.nbytes for value in tensors.values())


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    value = tensor.detach().cpu().contiguous()
    return value.to(torch.bfloat16) if value.is_floating_point() else value


@dataclass(frozen=True, slots=True)
class Teacher:
    """What the target says at the rows of one lesson: odds [M, C + R] over the columns of a step."""

    columns: Columns
    rows: torch.Tensor
    odds: torch.Tensor

    @classmethod
    def of(cls, ends: Ends, columns: Columns, lesson: Lesson) -> "Teacher":
        rows = ends.rows(columns)
        with torch.no_grad():
            logits = ends.logits(lesson.states, rows, columns.token)
            return cls(columns, rows, (logits + columns.weight).softmax(-1))

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
