"""A tiny target and some of its text, for tests of what learns from it."""

from dataclasses import dataclass
from pathlib import Path

import torch

from offspec.core.events import unheard
from offspec.distill.embed_head import Ends, take_ends
from offspec.distill.generate import write_taps
from offspec.distill.generate_batch import Question, answer
from offspec.distill.store import Store
from offspec.model.loaded import LoadedModel
from tests.support.tiny_models import load_all, open_model, write_model

TAPS = (0, 1, 2)
QUESTIONS = [
    Question((5, 6, 7), 0.0),
    Question((8, 9, 10, 11), 0.9),
    Question((12, 13, 14), 0.0),
    Question((20, 21, 22, 23, 24, 25), 0.7),
]


def loaded(folder: Path, family: str = "llama", spread: float = 0.2) -> LoadedModel:
    """Every layer of a model in memory."""
    target = open_model(write_model(folder, family, spread=spread))
    load_all(target, 256)
    return target


def written(target: LoadedModel, folder: Path, batches: int = 6, most: int = 24) -> Store:
    """Answers of the target to a few questions, batch after batch."""
    store = Store(folder, int(target.skeleton.config.hidden_size), target.dtype.itemsize)
    for batch in range(store.batches, batches):
        questions = [
            Question(tuple(3 + (token + 7 * batch) % 90 for token in question.ids), question.temperature)
            for question in QUESTIONS
        ]
        store.add(answer(target, questions, most, frozenset({2}), seed=batch))
    return store


@dataclass(frozen=True)
class School:
    """A loaded target, its text, and its ends, of which half the tokens are common."""

    target: LoadedModel
    store: Store
    ends: Ends

    @classmethod
    def opened(cls, folder: Path, family: str = "llama") -> "School":
        target = loaded(folder / "model", family)
        store = written(target, folder / "text")
        write_taps(store, target, TAPS, 3, unheard)
        ends = take_ends(target, store.answers(store.training()), 48)
        torch.set_grad_enabled(True)
        return cls(target, store, ends)

    @property
    def all_ends(self) -> Ends:
        """Ends of which all tokens are common."""
        matrix = self.ends.matrix
        return Ends(matrix, None, matrix.clone(), torch.arange(len(matrix)), 1.0, None)
