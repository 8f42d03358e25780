"""Cases: prompts, each at a temperature, each with several settings that must not change a token."""

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
    """A prompt by its number, and a temperature. Its answer is the same with all settings."""

    prompt: int
    temperature: float

    @property
    def key(self) -> str:
        return f"{self.prompt} T{self.temperature:g}"


@dataclass(frozen=True, slots=True)
class Case:
    """A question with settings.

    Args:
        question: The question.
        budget: Maximum nodes of a pass.
        memory: "tight": 8 % above the accepted minimum; "ample": all weights stay; "middle": in between.
        chunk: Maximum rows of a prompt or tree that pass through a layer at once.
        kept: Whether the second question finds the first one's KV cache, including rows of answer tokens as
            they were computed in trees.
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
    """Yield every prompt once per round, at every temperature over the rounds."""
    for turn, prompt in product(range(rounds), range(prompts)):
        yield Question(prompt, temperatures[(prompt + turn) % len(temperatures)])


def cases(asked: Sequence[Question], temperatures: int, each: int = len(BUDGETS)) -> Iterator[Case]:
    """Yield 1, 2 or 4 settings per question: one memory limit, with a different budget, chunk and cache each.

    Any 144 / each consecutive prompts at three temperatures contain each combination of settings once.
    """
    rest = [(memory, chunk, kept) for chunk, kept in product(CHUNKS, KEPT) for memory in MEMORIES]
    step = len(BUDGETS) // each
    for number, question in enumerate(asked):
        block, rank = divmod(number // temperatures, step)
        for turn in range(each):
            budget = BUDGETS[rank + step * turn]
            yield Case(question, budget, *rest[(block + len(MEMORIES) * turn) % len(rest)])
