"""Training a head, and measuring how well it predicts held-out text.

Batches have a fixed order, so an interrupted training resumes exactly.

Notation: D depths, K ranks, V vocabulary.
"""

import io
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from offspec.core import memory
from offspec.core.files import write_atomic
from offspec.core.private_folders import PRIVATE
from offspec.distill.config import TimeLimit
from offspec.distill.embed_head import EmbeddingAndHead
from offspec.distill.store import Store
from offspec.distill.student import Student, Teacher, TrainingBatch, read_training_batch
from offspec_planners.sequoia import best_tree_shape

_WARM_UP = 0.04  # share of the training in which the learning rate rises
_LAST_RATE = 0.02  # final learning rate, relative to the highest
_DRAWN = 512  # number of sampled tokens that are not common
_SAVE_SECONDS = 45.0  # between two saves of the state
RANKS = 32
NODES = 64  # size of the tree that figures are computed for
_ROWS = 256  # rows whose logits over the whole vocabulary are in memory at once
_MOST = 6000  # tokens to measure with


@dataclass(frozen=True, slots=True)
class Schedule:
    """Schedule of a training.

    Args:
        epochs: Passes over the text.
        minutes: Maximum time of training.
        rows: Minimum rows of a batch.
        rate: Highest learning rate.
        decay: Factor of each depth's weight in the loss, relative to the previous depth.
    """

    epochs: int = 10
    minutes: float | None = None
    rows: int = 256
    rate: float = 1e-3
    decay: float = 0.8


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """Result of a training. steps: batches; epochs: passes over the text; loss: recent loss by depth."""

    steps: int
    epochs: float
    seconds: float
    loss: tuple[float, ...]


class Training:
    """A head in training, its optimizer and its progress. state: file in which progress is saved.

    name: identifies the training, so that the state of another one is not resumed.
    """

    def __init__(
        self,
        student: Student,
        store: Store,
        embed_head: EmbeddingAndHead,
        schedule: Schedule,
        state: Path,
        name: str,
    ) -> None:
        self._make_student, self._store, self._embed_head, self._schedule = (
            student,
            store,
            embed_head,
            schedule,
        )
        self._state, self._name = state, name
        self._numbers = store.training()
        self._lengths = [store.length(number) for number in self._numbers]
        self._optimizer = torch.optim.AdamW(
            student.module.parameters(), lr=schedule.rate, weight_decay=0.01, fused=True
        )
        self._step, self._seconds = 0, 0.0
        self._loss: list[float] = []
        self._whole = True  # False while weights and step count are inconsistent
        self.resumed = self._resume()

    def run(self, progress: Callable[[int, int, str], None]) -> TrainingResult:
        """Train to the end of the schedule. progress: receives completed batches, their total, and the loss.

        Saves its state if interrupted. Raises DiskFullError.
        """
        per_epoch = len(self._batches(0))
        total = per_epoch * self._schedule.epochs
        kept = began = time.monotonic()
        before = self._seconds
        try:
            for batch in self._remaining(per_epoch, total):
                share = self._share(total)
                if share >= 1:
                    break
                self._train_step(batch, share)
                memory.malloc_trim()  # batches differ in length, which would fragment memory
                now = time.monotonic()
                self._seconds = before + now - began
                done = round(min(1.0, self._share(total)) * total)
                progress(done, total, f"loss {self._loss[0]:.3f}" if self._loss else "")
                if now - kept > _SAVE_SECONDS:
                    self._save_state()
                    kept = now
        except BaseException:
            if self._whole:
                self._save_state()
            raise
        self._save_state()
        return TrainingResult(self._step, self._step / max(1, per_epoch), self._seconds, tuple(self._loss))

    def _share(self, total: int) -> float:
        """Return the completed share of the schedule, by batches or by time, whichever is larger."""
        by_clock = self._seconds / (60 * self._schedule.minutes) if self._schedule.minutes else 0.0
        return max(self._step / max(1, total), by_clock)

    def _remaining(self, per_epoch: int, total: int) -> Iterator[TrainingBatch]:
        device = self._embed_head.matrix.device
        for step in range(self._step, total):
            epoch, index = divmod(step, per_epoch)
            if step == self._step or index == 0:
                batches = self._batches(epoch)
            yield read_training_batch(self._store, batches[index], device, whole=self._make_student.whole)

    def _batches(self, epoch: int) -> list[Sequence[int]]:
        """Return the passages of each batch of an epoch; every epoch has the same number of batches."""
        order = torch.randperm(len(self._numbers), generator=torch.Generator().manual_seed(epoch)).tolist()
        rows = sum(self._lengths)
        count = max(1, min(len(order), rows // self._schedule.rows))
        return [[self._numbers[at] for at in order[index::count]] for index in range(count)]

    def _train_step(self, batch: TrainingBatch, share: float) -> None:
        random = torch.Generator().manual_seed(self._step)
        teacher = Teacher.of(self._embed_head, self._embed_head.draw(_DRAWN, random), batch)
        losses = self._make_student.losses(batch, teacher)
        if losses:
            for group in self._optimizer.param_groups:
                group["lr"] = self._schedule.rate * _rate(share)
            self._optimizer.zero_grad()
            whole = torch.stack([loss * self._schedule.decay**at for at, loss in enumerate(losses)]).sum()
            whole.backward()
            torch.nn.utils.clip_grad_norm_(self._make_student.module.parameters(), 1.0)
            self._whole = False
            self._optimizer.step()
            found = [float(loss.detach()) for loss in losses]
            old = self._loss if len(self._loss) == len(found) else found
            self._loss = [0.95 * a + 0.05 * b for a, b in zip(old, found, strict=True)]
        self._step += 1
        self._whole = True

    def _save_state(self) -> None:
        held = io.BytesIO()
        torch.save(
            {
                "name": self._name,
                "step": self._step,
                "seconds": self._seconds,
                "loss": self._loss,
                "module": self._make_student.module.state_dict(),
                "optimizer": self._optimizer.state_dict(),
            },
            held,
        )
        write_atomic(self._state, held.getvalue(), PRIVATE)

    def _resume(self) -> bool:
        """Resume an interrupted run of the same training; return whether there is one."""
        try:
            found: dict[str, Any] = torch.load(self._state, map_location="cpu", weights_only=True)
            if found["name"] != self._name:
                return False
            self._make_student.module.load_state_dict(found["module"])
            self._optimizer.load_state_dict(found["optimizer"])
            self._step, self._seconds, self._loss = found["step"], found["seconds"], found["loss"]
        except Exception:  # absent, damaged, or written by another version: training starts over
            return False
        return True


def _rate(share: float) -> float:
    """Return the learning rate relative to the highest: linear warm-up, then cosine decay."""
    if share < _WARM_UP:
        return max(share, 1e-3) / _WARM_UP
    fall = (share - _WARM_UP) / (1 - _WARM_UP)
    return _LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, fall)))


@dataclass(frozen=True, slots=True)
class HeadAcceptance:
    """Acceptance of a head on held-out text.

    Args:
        acceptance: [D, K]; how often prediction k at depth d was correct, given correct ones before it.
        rows: Tokens it was measured on.
        nodes: Size of the tree that `expected` is computed for.
    """

    acceptance: NDArray[np.float64]
    rows: int
    nodes: int = NODES

    @property
    def first(self) -> tuple[float, ...]:
        """Accuracy of the first prediction, by depth."""
        return tuple(float(row[0]) for row in self.acceptance)

    @property
    def fifth(self) -> tuple[float, ...]:
        """Accuracy of the first five predictions, by depth."""
        return tuple(float(row[:5].sum()) for row in self.acceptance)

    @property
    def expected(self) -> float:
        """Tokens per pass with the best tree of that size, including the bonus token."""
        if not self.rows:
            return 1.0
        return best_tree_shape(self.acceptance, self.nodes, len(self.acceptance)).expected


def measure_head(
    student: Student,
    store: Store,
    numbers: Sequence[int],
    device: torch.device,
    limit: TimeLimit,
    progress: Callable[[int], None],
) -> HeadAcceptance:
    """Measure a head on as many passages as time allows. progress: receives the number completed."""
    hits, counts = np.zeros((student.depth, RANKS)), np.zeros(student.depth)
    with torch.no_grad():
        for done, number in enumerate(numbers):
            if counts[0] >= _MOST or (counts[0] and limit.left <= 0):
                break
            batch = read_training_batch(store, [number], device, whole=student.whole)
            for depth, scores in enumerate(student.predictions(batch)):
                for logits, truth in zip(scores.logits.split(_ROWS), scores.truth.split(_ROWS), strict=True):
                    hits[depth] += _ranks(logits, batch.tokens[truth])
                counts[depth] += len(scores.truth)
            progress(done + 1)
    return HeadAcceptance(hits / np.maximum(counts, 1)[:, None], int(counts[0]))


def _ranks(logits: torch.Tensor, truth: torch.Tensor) -> NDArray[np.float64]:
    """Return how often the truth [n] had each rank among logits [n, V]: [K]."""
    ranks = min(RANKS, logits.shape[1])
    hit = logits.topk(ranks, -1).indices == truth[:, None]
    found = np.zeros(RANKS)
    found[:ranks] = hit.sum(0).cpu().numpy()
    return found
