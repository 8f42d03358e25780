"""What a target says, and what it thought as it said it: answers to many questions at once.

The pass that writes a token also makes the states behind it, so that nothing is computed twice.

Letters: B sequences, n tokens of one, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from offspec.core import memory
from offspec.distill.batched_forward import Batch
from offspec.model.loaded import LoadedModel

PIECE = 64  # positions of the questions that are read together


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt in token ids, and how it is to be answered; temperature 0 is greedy."""

    ids: tuple[int, ...]
    temperature: float


@dataclass(frozen=True, slots=True)
class Passage:
    """tokens [n] int64, prompt and answer, the first `prompt` of them the question's.

    states [n, H] behind the final norm, of which each says what token comes next; taps, [n, H] each: what
    enters some of the layers, where that was computed.
    """

    tokens: torch.Tensor
    prompt: int
    states: torch.Tensor
    taps: tuple[torch.Tensor, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)


def answer(
    target: LoadedModel,
    questions: Sequence[Question],
    most: int,
    ends: frozenset[int],
    *,
    seed: int = 0,
    step: Callable[[int], bool | None] | None = None,
) -> list[Passage]:
    """Answers of at most `most` tokens, or up to one of `ends`, to questions that are answered side by side.

    step: takes after each pass how many tokens are written. If it returns True, all answers end there, and
        questions without one are left out; it may raise to break off.
    """
    length = max(len(question.ids) for question in questions) + most
    batch = Batch(target, length)
    with batch.running():
        return _Answers(target, batch, questions, most, ends, seed).write(step)


class _Answers:
    """All sequences are as long as the others at any time: a longer question is still being read while a
    shorter one is answered already, so that none needs to be padded."""

    def __init__(
        self,
        target: LoadedModel,
        batch: Batch,
        questions: Sequence[Question],
        most: int,
        ends: frozenset[int],
        seed: int,
    ) -> None:
        self._target, self._batch = target, batch
        self._random = torch.Generator(target.device).manual_seed(seed)
        self._ends = torch.tensor(sorted(ends) or [-1], device=target.device)
        lengths = torch.tensor([len(question.ids) for question in questions])
        count, longest = len(questions), int(lengths.max())
        self._prompt, self._stop = lengths, lengths + most
        self._tokens = torch.zeros(count, longest + most, dtype=torch.int64)
        for row, question in enumerate(questions):
            self._tokens[row, : len(question.ids)] = torch.tensor(question.ids)
        self._temperature = torch.tensor([question.temperature for question in questions])
        self._written = torch.zeros(count, dtype=torch.int64)
        self._states: torch.Tensor | None = None  # [B, n, H]

    def write(self, step: Callable[[int], bool | None] | None) -> list[Passage]:
        alive = torch.arange(len(self._prompt))
        position = int(self._prompt.min())
        for start in range(0, position, PIECE):
            hidden = self._run(alive, start, min(start + PIECE, position))
        while len(alive):
            self._choose(alive, position, hidden)
            hidden = self._run(alive, position, position + 1)
            said = self._tokens[alive, position]
            ended = torch.isin(said, self._ends.cpu()) & (position >= self._prompt[alive])
            position += 1
            ended |= position >= self._stop[alive]
            if step is not None and step(int((self._written - self._prompt).clamp_min(0).sum())):
                break
            if bool(ended.any()):
                kept = (~ended).nonzero()[:, 0]
                alive, hidden = alive[kept], hidden[kept.to(hidden.device)]
                self._batch.keep(kept.to(hidden.device))
                memory.trim()  # of the caches that were left
        return [self._passage(row) for row in (self._written > self._prompt).nonzero()[:, 0].tolist()]

    def _run(self, alive: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """Positions start to end of the sequences that go on; the states [B, H] of the last."""
        states, _ = self._batch.run(self._tokens[alive, start:end].to(self._target.device))
        if self._states is None:
            self._states = states.new_zeros(*self._tokens.shape, states.shape[-1], device="cpu")
        self._states[alive, start:end] = states.cpu()
        self._written[alive] = end
        return states[:, -1]

    def _choose(self, alive: torch.Tensor, position: int, hidden: torch.Tensor) -> None:
        """The token at a position of every sequence whose question is over."""
        asked = (position >= self._prompt[alive]).nonzero()[:, 0]
        if not len(asked):
            return
        logits = self._target.tree_model.logits(hidden[asked.to(hidden.device)]).float()
        chosen = logits.argmax(-1)
        warm = (self._temperature[alive[asked]] > 0).nonzero()[:, 0]
        if len(warm):
            heat = self._temperature[alive[asked[warm]]].to(logits.device)[:, None]
            odds = (logits[warm.to(logits.device)] / heat).softmax(-1)
            picked = torch.multinomial(odds, 1, generator=self._random)[:, 0]
            chosen[warm.to(logits.device)] = picked
        self._tokens[alive[asked], position] = chosen.cpu()

    def _passage(self, row: int) -> Passage:
        end = int(self._written[row])
        assert self._states is not None
        return Passage(self._tokens[row, :end], int(self._prompt[row]), self._states[row, :end])
