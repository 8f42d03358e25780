"""What is asked: prompts, each at a temperature, each under several settings that must not change a token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

BUDGETS = (1, 7, 64, 256)
MEMORIES = ("tight", "middle", "ample")
CHUNKS = (64, 1024)
KEPT = (True, False)


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt by its number, and a temperature. Its answer is the same under all settings."""

    prompt: int
    temperature: float

    @property
    def key(self) -> str:
        return f"{self.prompt} T{self.temperature:g}"


@dataclass(frozen=True, slots=True)
class Case:
    """A question under settings.

    Args:
        question: What is asked.
        budget: Most nodes of a pass.
        memory: "tight": 8 % above the least that is accepted; "ample": everything stays; "middle": half way.
        chunk: Most rows of a prompt or tree that go through a layer together.
        kept: Whether the second question finds keys and values of the first in the cache, those of the
            answer's tokens as they came in trees among them.
    """

    question: Question
    budget: int
    memory: str
    chunk: int
    kept: bool

    @property
    def key(self) -> str:
        kept = "kept" if self.kept else "anew"
        return f"{self.question.key} budget {self.budget} {self.memory} chunk {self.chunk} {kept}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "key": self.key}


def questions(prompts: int, temperatures: Sequence[float], rounds: int) -> Iterator[Question]:
    """In each round every prompt once; over the rounds at every temperature."""
    for turn, prompt in product(range(rounds), range(prompts)):
        yield Question(prompt, temperatures[(prompt + turn) % len(temperatures)])


def cases(asked: Sequence[Question], temperatures: int, each: int = len(BUDGETS)) -> Iterator[Case]:
    """Each question under 1, 2 or 4 settings: at one memory, with another budget, chunk and cache each time.

    Of any 144 / each prompts in a row, at three temperatures, each combination of all settings is there once.
    """
    rest = [(memory, chunk, kept) for chunk, kept in product(CHUNKS, KEPT) for memory in MEMORIES]
    step = len(BUDGETS) // each
    for number, question in enumerate(asked):
        block, rank = divmod(number // temperatures, step)
        for turn in range(each):
            budget = BUDGETS[rank + step * turn]
            yield Case(question, budget, *rest[(block + len(MEMORIES) * turn) % len(rest)])
