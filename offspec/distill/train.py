"""Training a head, and measuring how well it guesses text that it did not learn from.

Lessons come in a fixed order, so that what was broken off goes on as if it had not been.

Letters: D depths, K ranks, V vocabulary.
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
from offspec.core.files import write_file
from offspec.core.private import PRIVATE
from offspec.distill.config import TimeLimit
from offspec.distill.embed_head import Ends
from offspec.distill.store import Store
from offspec.distill.student import Lesson, Pupil, Teacher, read_lesson
from offspec_planners.sequoia import best_tree_shape

_WARM_UP = 0.04  # of the training, in which the rate rises
_LAST_RATE = 0.02  # of the highest, at the end
_DRAWN = 512  # tokens drawn of those that are not common
_KEEP_SECONDS = 45.0  # between two writings of the state
RANKS = 32
NODES = 64  # of the tree that figures are made for
_ROWS = 256  # rows whose logits over the whole vocabulary are there at once
_MOST = 6000  # tokens to measure with


@dataclass(frozen=True, slots=True)
class Schedule:
    """epochs: times through the text; minutes: of training at most; rows: of a lesson, at least; rate: of
    learning, at its highest; decay: of each depth's weight in the loss, against the one before.
    """

    epochs: int = 10
    minutes: float | None = None
    rows: int = 256
    rate: float = 1e-3
    decay: float = 0.8


@dataclass(frozen=True, slots=True)
class Trained:
    """steps: lessons taken; epochs: times through the text; seconds: of training; loss: lately, by depth."""

    steps: int
    epochs: float
    seconds: float
    loss: tuple[float, ...]


class Training:
    """A head in training, its optimiser and how far it is. state: a file that it is kept in meanwhile.

    name: what the training is of, so that the state of another is not taken up.
    """

    def __init__(
        self, pupil: Pupil, store: Store, ends: Ends, schedule: Schedule, state: Path, name: str
    ) -> None:
        self._pupil, self._store, self._ends, self._schedule = pupil, store, ends, schedule
        self._state, self._name = state, name
        self._numbers = store.training()
        self._lengths = [store.length(number) for number in self._numbers]
        self._optimiser = torch.optim.AdamW(
            pupil.module.parameters(), lr=schedule.rate, weight_decay=0.01, fused=True
        )
        self._step, self._seconds = 0, 0.0
        self._loss: list[float] = []
        self._whole = True  # False while weights and steps do not belong together
        self.resumed = self._take_up()

    def run(self, progress: Callable[[int, int, str], None]) -> Trained:
        """Train to the end of the schedule. progress: told how many lessons are done, of how many; the loss.

        Interrupted it keeps its state. Raises DiskFullError.
        """
        per_epoch = len(self._lessons(0))
        total = per_epoch * self._schedule.epochs
        kept = began = time.monotonic()
        before = self._seconds
        try:
            for lesson in self._remaining(per_epoch, total):
                share = self._share(total)
                if share >= 1:
                    break
                self._learn(lesson, share)
                memory.trim()  # lessons differ in length, which would leave memory in pieces
                now = time.monotonic()
                self._seconds = before + now - began
                done = round(min(1.0, self._share(total)) * total)
                progress(done, total, f"loss {self._loss[0]:.3f}" if self._loss else "")
                if now - kept > _KEEP_SECONDS:
                    self._keep()
                    kept = now
        except BaseException:
            if self._whole:
                self._keep()
            raise
        self._keep()
        return Trained(self._step, self._step / max(1, per_epoch), self._seconds, tuple(self._loss))

    def _share(self, total: int) -> float:
        """Of the schedule that is done, by lessons or by the clock, whichever is further."""
        by_clock = self._seconds / (60 * self._schedule.minutes) if self._schedule.minutes else 0.0
        return max(self._step / max(1, total), by_clock)

    def _remaining(self, per_epoch: int, total: int) -> Iterator[Lesson]:
        device = self._ends.matrix.device
        for step in range(self._step, total):
            epoch, index = divmod(step, per_epoch)
            if step == self._step or index == 0:
                lessons = self._lessons(epoch)
            yield read_lesson(self._store, lessons[index], device, whole=self._pupil.whole)

    def _lessons(self, epoch: int) -> list[Sequence[int]]:
        """The passages of each lesson of an epoch; every epoch has as many."""
        order = torch.randperm(len(self._numbers), generator=torch.Generator().manual_seed(epoch)).tolist()
        rows = sum(self._lengths)
        count = max(1, min(len(order), rows // self._schedule.rows))
        return [[self._numbers[at] for at in order[index::count]] for index in range(count)]

    def _learn(self, lesson: Lesson, share: float) -> None:
        random = torch.Generator().manual_seed(self._step)
        teacher = Teacher.of(self._ends, self._ends.draw(_DRAWN, random), lesson)
        losses = self._pupil.losses(lesson, teacher)
        if losses:
            for group in self._optimiser.param_groups:
                group["lr"] = self._schedule.rate * _rate(share)
            self._optimiser.zero_grad()
            whole = torch.stack([loss * self._schedule.decay**at for at, loss in enumerate(losses)]).sum()
            whole.backward()
            torch.nn.utils.clip_grad_norm_(self._pupil.module.parameters(), 1.0)
            self._whole = False
            self._optimiser.step()
            found = [float(loss.detach()) for loss in losses]
            old = self._loss if len(self._loss) == len(found) else found
            self._loss = [0.95 * a + 0.05 * b for a, b in zip(old, found, strict=True)]
        self._step += 1
        self._whole = True

    def _keep(self) -> None:
        held = io.BytesIO()
        torch.save(
            {
                "name": self._name,
                "step": self._step,
                "seconds": self._seconds,
                "loss": self._loss,
                "module": self._pupil.module.state_dict(),
                "optimiser": self._optimiser.state_dict(),
            },
            held,
        )
        write_file(self._state, held.getvalue(), PRIVATE)

    def _take_up(self) -> bool:
        """Go on where an earlier run of the same training was broken off."""
        try:
            found: dict[str, Any] = torch.load(self._state, map_location="cpu", weights_only=True)
            if found["name"] != self._name:
                return False
            self._pupil.module.load_state_dict(found["module"])
            self._optimiser.load_state_dict(found["optimiser"])
            self._step, self._seconds, self._loss = found["step"], found["seconds"], found["loss"]
        except Exception:  # absent, damaged, or written by another version: training starts again
            return False
        return True


def _rate(share: float) -> float:
    """Of the highest rate, when this share of the training is done: up at once, then down a cosine."""
    if share < _WARM_UP:
        return max(share, 1e-3) / _WARM_UP
    fall = (share - _WARM_UP) / (1 - _WARM_UP)
    return _LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, fall)))


@dataclass(frozen=True, slots=True)
class HeadAcceptance:
    """acceptance [D, K]: how often guess k at depth d was the next token, where those before it were right.

    rows: tokens it was measured on; nodes: of the tree that `expected` is of.
    """

    acceptance: NDArray[np.float64]
    rows: int
    nodes: int = NODES

    @property
    def first(self) -> tuple[float, ...]:
        """By depth how often the first guess was right."""
        return tuple(float(row[0]) for row in self.acceptance)

    @property
    def fifth(self) -> tuple[float, ...]:
        """By depth how often one of the first five was."""
        return tuple(float(row[:5].sum()) for row in self.acceptance)

    @property
    def expected(self) -> float:
        """Tokens per pass with the best tree of that size, the bonus token included."""
        if not self.rows:
            return 1.0
        return best_tree_shape(self.acceptance, self.nodes, len(self.acceptance)).expected


def measure_head(
    pupil: Pupil,
    store: Store,
    numbers: Sequence[int],
    device: torch.device,
    limit: TimeLimit,
    progress: Callable[[int], None],
) -> HeadAcceptance:
    """Ask a head about some passages, as many as there is time for. progress: takes how many are done."""
    hits, counts = np.zeros((pupil.depth, RANKS)), np.zeros(pupil.depth)
    with torch.no_grad():
        for done, number in enumerate(numbers):
            if counts[0] >= _MOST or (counts[0] and limit.left <= 0):
                break
            lesson = read_lesson(store, [number], device, whole=pupil.whole)
            for depth, scores in enumerate(pupil.guesses(lesson)):
                for logits, truth in zip(scores.logits.split(_ROWS), scores.truth.split(_ROWS), strict=True):
                    hits[depth] += _ranks(logits, lesson.tokens[truth])
                counts[depth] += len(scores.truth)
            progress(done + 1)
    return HeadAcceptance(hits / np.maximum(counts, 1)[:, None], int(counts[0]))


def _ranks(logits: torch.Tensor, truth: torch.Tensor) -> NDArray[np.float64]:
    """[K]: how often the truth [n] had each rank among logits [n, V]."""
    ranks = min(RANKS, logits.shape[1])
    hit = logits.topk(ranks, -1).indices == truth[:, None]
    found = np.zeros(RANKS)
    found[:ranks] = hit.sum(0).cpu().numpy()
    return found
