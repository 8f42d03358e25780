"""A tiny target and some of its text, for tests of heads that are trained on it."""

from dataclasses import dataclass
from pathlib import Path

import torch

from offspec.core.events import ignore_event
from offspec.distill.embed_head import EmbeddingAndHead, take_embedding_and_head
from offspec.distill.generate import write_taps
from offspec.distill.generate_batch import TrainingPrompt, generate_answers
from offspec.distill.store import Store
from offspec.model.loaded import LoadedModel
from tests.support.tiny_models import load_all, open_model, write_model

TAPS = (0, 1, 2)
QUESTIONS = [
    TrainingPrompt((5, 6, 7), 0.0),
    TrainingPrompt((8, 9, 10, 11), 0.9),
    TrainingPrompt((12, 13, 14), 0.0),
    TrainingPrompt((20, 21, 22, 23, 24, 25), 0.7),
]


def loaded(folder: Path, family: str = "llama", spread: float = 0.2) -> LoadedModel:
    """Load a model with every layer in memory."""
    target = open_model(write_model(folder, family, spread=spread))
    load_all(target, 256)
    return target


def written(target: LoadedModel, folder: Path, batches: int = 6, most: int = 24) -> Store:
    """Generate answers of the target to a few questions, in batches."""
    store = Store(folder, int(target.skeleton.config.hidden_size), target.dtype.itemsize)
    for batch in range(store.batches, batches):
        questions = [
            TrainingPrompt(
                tuple(3 + (token + 7 * batch) % 90 for token in question.ids), question.temperature
            )
            for question in QUESTIONS
        ]
        store.add(generate_answers(target, questions, most, frozenset({2}), seed=batch))
    return store


@dataclass(frozen=True)
class School:
    """A loaded target, its text, and its embedding and head, with half of the tokens common."""

    target: LoadedModel
    store: Store
    embed_head: EmbeddingAndHead

    @classmethod
    def opened(cls, folder: Path, family: str = "llama") -> "School":
        target = loaded(folder / "model", family)
        store = written(target, folder / "text")
        write_taps(store, target, TAPS, 3, ignore_event)
        embed_head = take_embedding_and_head(target, store.answers(store.training()), 48)
        torch.set_grad_enabled(True)
        return cls(target, store, embed_head)

    @property
    def full_embed_head(self) -> EmbeddingAndHead:
        """Return embedding and head with all tokens common."""
        matrix = self.embed_head.matrix
        return EmbeddingAndHead(matrix, None, matrix.clone(), torch.arange(len(matrix)), 1.0, None)
