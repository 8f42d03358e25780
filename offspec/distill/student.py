"""A head in training: the rows of a training step, and the interface of every kind of head.

Notation: M rows of a batch, n rows with a prediction, H hidden size, V vocabulary, D depths.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from offspec.checkpoint.folder import CONFIG
from offspec.checkpoint.json_file import write_json
from offspec.checkpoint.safetensors_writer import save_tensors
from offspec.core.files import atomic_folder
from offspec.distill.embed_head import EmbeddingAndHead, TokenSample
from offspec.distill.store import Store


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Rows of some passages.

    Args:
        tokens: [M].
        states: [M, H] after the final norm.
        taps: Inputs of some layers, [M, H] each.
        remaining: [M]; number of following rows in the same passage.
        in_answer: [M]; whether the next token belongs to an answer, not to a question.
    """

    tokens: torch.Tensor
    states: torch.Tensor
    taps: tuple[torch.Tensor, ...]
    remaining: torch.Tensor
    in_answer: torch.Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def rows_before(self, count: int, extra: int = 0) -> torch.Tensor:
        """Return rows [n] that are followed by `count + extra` others and predict tokens of an answer.

        The token after such a row's state is the root of a tree: the last of a question, or one of an answer.
        """
        rows = (self.remaining >= max(1, count + extra)).nonzero()[:, 0]
        return rows[self.in_answer[rows + 1]]


def read_training_batch(
    store: Store, numbers: Sequence[int], device: torch.device, *, whole: bool
) -> TrainingBatch:
    """Read some passages. whole: with their questions; otherwise only the end of each question is read."""
    read = [store.read(number) for number in numbers]
    starts = [0 if whole else max(0, passage.prompt - 2) for passage in read]
    remaining = [torch.arange(len(p) - start - 1, -1, -1) for p, start in zip(read, starts, strict=True)]
    in_answer = [torch.arange(start, len(p)) >= p.prompt - 1 for p, start in zip(read, starts, strict=True)]

    def joined(of: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part[start:] for part, start in zip(of, starts, strict=True)]).to(device)

    return TrainingBatch(
        tokens=joined([passage.tokens for passage in read]),
        states=joined([passage.states for passage in read]),
        taps=tuple(joined(taps) for taps in zip(*(passage.taps for passage in read), strict=True)),
        remaining=torch.cat(remaining).to(device),
        in_answer=torch.cat(in_answer).to(device),
    )


@dataclass(frozen=True, slots=True)
class Published:
    """Published format of a head: config.json, and the tensors of one safetensors file by name."""

    config: dict[str, Any]
    file: str
    tensors: dict[str, torch.Tensor]

    def write(self, out: Path) -> int:
        """Create the folder atomically. Returns the bytes of its tensors. Raises DiskFullError."""
        tensors = {name: _stored(tensor) for name, tensor in self.tensors.items()}
        with atomic_folder(out) as partial:
            save_tensors(partial / self.file, tensors)
            write_json(partial / CONFIG, self.config)
        return sum(value.nbytes for value in tensors.values())


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    value = tensor.detach().cpu().contiguous()
    return value.to(torch.bfloat16) if value.is_floating_point() else value


@dataclass(frozen=True, slots=True)
class Teacher:
    """Distribution of the target at the rows of one batch: odds [M, C + R] over the columns of a step."""

    columns: TokenSample
    rows: torch.Tensor
    odds: torch.Tensor

    @classmethod
    def of(cls, embed_head: EmbeddingAndHead, columns: TokenSample, batch: TrainingBatch) -> "Teacher":
        rows = embed_head.rows(columns)
        with torch.no_grad():
            logits = embed_head.logits(batch.states, rows, columns.token)
            return cls(columns, rows, (logits + columns.weight).softmax(-1))

    def loss(self, logits: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy of a student's logits [n, C + R] with the odds at rows `at` [n]."""
        return torch.nn.functional.cross_entropy(logits + self.columns.weight, self.odds[at])

    def common_loss(self, logits: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy of a student that has only common tokens: logits [n, C]."""
        odds = self.odds[at, : logits.shape[1]]
        return torch.nn.functional.cross_entropy(logits, odds / odds.sum(-1, keepdim=True).clamp_min(1e-6))


@dataclass(frozen=True, slots=True)
class Scores:
    """Logits [n, V] of one depth's predictions. truth [n]: rows of the batch that hold the true token."""

    logits: torch.Tensor
    truth: torch.Tensor


class Student(Protocol):
    """A head in training.

    Args:
        kind: Value of `--kind`.
        depth: D, number of consecutive tokens that it predicts.
        whole: Whether its batches include the questions.
        module: The trained module.
    """

    kind: str
    depth: int
    whole: bool

    @property
    def module(self) -> torch.nn.Module: ...

    def losses(self, batch: TrainingBatch, teacher: Teacher) -> list[torch.Tensor]:
        """Return the loss of each depth, without depths that no row reaches."""

    def predictions(self, batch: TrainingBatch) -> Iterator[Scores]:
        """Yield by depth its predictions, given the true tokens before them."""

    def to_checkpoint(self, name: str) -> Published:
        """Return the head in its published format. name: the target's."""
