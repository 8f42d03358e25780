"""Answers of a target to a batch of questions, with the hidden states that predicted each token.

The pass that generates a token also computes its states, so nothing is computed twice.

Notation: B sequences, n tokens of one, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from offspec.core import memory
from offspec.distill.batched_forward import Batch
from offspec.model.loaded import LoadedModel

PROMPT_CHUNK = 64  # positions of the questions per prefill pass


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """A prompt in token ids, and the temperature of its answer (0: greedy)."""

    ids: tuple[int, ...]
    temperature: float


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """A question and its answer.

    Args:
        tokens: int64 [n]; the first `prompt` of them are the question.
        prompt: Length of the question.
        states: [n, H] after the final norm; each predicts the next token.
        taps: Inputs of some layers, [n, H] each, if computed.
    """

    tokens: torch.Tensor
    prompt: int
    states: torch.Tensor
    taps: tuple[torch.Tensor, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)


def generate_answers(
    target: LoadedModel,
    questions: Sequence[TrainingPrompt],
    most: int,
    eos_ids: frozenset[int],
    *,
    seed: int = 0,
    step: Callable[[int], bool | None] | None = None,
) -> list[GeneratedText]:
    """Generate answers of at most `most` tokens, or up to one of `eos_ids`, to a batch of questions.

    step: receives the number of tokens generated so far, after each pass. If it returns True, all answers end
        there, and questions without an answer are dropped; it may raise to abort.
    """
    length = max(len(question.ids) for question in questions) + most
    batch = Batch(target, length)
    with batch.patched_target():
        return _BatchGenerator(target, batch, questions, most, eos_ids, seed).write(step)


class _BatchGenerator:
    """Answers in progress. All sequences have the same length at any time: a longer question is still being
    prefilled while a shorter one is already answered, so no padding is needed."""

    def __init__(
        self,
        target: LoadedModel,
        batch: Batch,
        questions: Sequence[TrainingPrompt],
        most: int,
        eos_ids: frozenset[int],
        seed: int,
    ) -> None:
        self._target, self._batch = target, batch
        self._random = torch.Generator(target.device).manual_seed(seed)
        self._eos_ids = torch.tensor(sorted(eos_ids) or [-1], device=target.device)
        lengths = torch.tensor([len(question.ids) for question in questions])
        count, longest = len(questions), int(lengths.max())
        self._prompt, self._stop = lengths, lengths + most
        self._tokens = torch.zeros(count, longest + most, dtype=torch.int64)
        for row, question in enumerate(questions):
            self._tokens[row, : len(question.ids)] = torch.tensor(question.ids)
        self._temperature = torch.tensor([question.temperature for question in questions])
        self._written = torch.zeros(count, dtype=torch.int64)
        self._states: torch.Tensor | None = None  # [B, n, H]

    def write(self, step: Callable[[int], bool | None] | None) -> list[GeneratedText]:
        alive = torch.arange(len(self._prompt))
        position = int(self._prompt.min())
        for start in range(0, position, PROMPT_CHUNK):
            hidden = self._run(alive, start, min(start + PROMPT_CHUNK, position))
        while len(alive):
            self._choose(alive, position, hidden)
            hidden = self._run(alive, position, position + 1)
            said = self._tokens[alive, position]
            ended = torch.isin(said, self._eos_ids.cpu()) & (position >= self._prompt[alive])
            position += 1
            ended |= position >= self._stop[alive]
            if step is not None and step(int((self._written - self._prompt).clamp_min(0).sum())):
                break
            if bool(ended.any()):
                kept = (~ended).nonzero()[:, 0]
                alive, hidden = alive[kept], hidden[kept.to(hidden.device)]
                self._batch.keep(kept.to(hidden.device))
                memory.malloc_trim()  # return the memory of dropped caches
        return [self._passage(row) for row in (self._written > self._prompt).nonzero()[:, 0].tolist()]

    def _run(self, alive: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """Run positions start to end of the remaining sequences; return the states [B, H] of the last."""
        states, _ = self._batch.run(self._tokens[alive, start:end].to(self._target.device))
        if self._states is None:
            self._states = states.new_zeros(*self._tokens.shape, states.shape[-1], device="cpu")
        self._states[alive, start:end] = states.cpu()
        self._written[alive] = end
        return states[:, -1]

    def _choose(self, alive: torch.Tensor, position: int, hidden: torch.Tensor) -> None:
        """Choose the token at a position for every sequence whose question has ended."""
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

    def _passage(self, row: int) -> GeneratedText:
        end = int(self._written[row])
        assert self._states is not None
        return GeneratedText(self._tokens[row, :end], int(self._prompt[row]), self._states[row, :end])
