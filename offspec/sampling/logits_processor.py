"""From logits to the next token: rules, temperature, filters, and the pick.

Each node of a token tree has a history of its own: the committed tokens, then the path to the node. The
order is transformers': the rules (`sampling.rules`), temperature, top_k, top_p, min_p. Every step is
elementwise or compares with a threshold, and a row is processed alone, so what a node gets does not depend on
the tree around it.

Letters: V vocabulary, W nodes.
"""

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from offspec.core.config import SamplingParams
from offspec.core.errors import CheckpointError, OffspecError, RequestError
from offspec.core.events import TokenLogprobs
from offspec.sampling.constraint import Format
from offspec.sampling.filters import border, borders
from offspec.sampling.noise import GumbelNoise
from offspec.sampling.rules import rules_of
from offspec_kernels.gumbel_argmax import gumbel_argmax, keep_above
from offspec_kernels.transfer import download

# Logits divided by less than this could overflow float32. Two float32 logits that differ are then at least
# 10^10 apart, far beyond any noise: the sample is the greedy token, as it would be at a lower temperature.
_COLDEST = 1e-20
_HOTTEST = 1e38  # near the largest float32; all tokens are as likely, as they would be beyond


class Choice(NamedTuple):
    """A token, its noisy score, and the largest of the others."""

    token: int
    best: float
    second: float


class LogitsProcessor:
    """Applies `SamplingParams` to logits, at any node below one committed history.

    A node's path is the tokens between the committed history and its logits: those after the last
    committed token, the node's own included. They count as output.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt: Sequence[int],
        device: torch.device | str = "cpu",
        *,
        ends: Collection[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
        format: Format | None = None,
    ) -> None:
        """format: of `params`, as a rule; the others: see `rules_of`. Raises RequestError."""
        self.params = params
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        # Greedy scores are not divided.
        self._temperature = 1.0 if params.greedy else min(max(params.temperature, _COLDEST), _HOTTEST)
        self._filters = not params.greedy and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)
        self._rules = rules_of(params, vocab_size, prompt, self.device, ends=ends, bad_words=bad_words)
        self.format = format
        if format is not None:
            self._rules.append(format)

    @property
    def uses_noise(self) -> bool:
        """False when decoding is greedy: `choose` then takes no noise."""
        return not self.params.greedy

    def commit(self, tokens: Sequence[int]) -> None:
        """Adds output tokens to the history of every node."""
        for rule in self._rules:
            rule.commit(tokens)

    def choose(
        self, logits: Tensor, path: Sequence[int], noise: GumbelNoise | None, position: int
    ) -> tuple[int, float]:
        """The token that follows one node, and its lead on the second best in nats.

        logits: [V]. The rest, and the errors, are those of `choices` and `settled`.
        """
        (choice,) = self.choices(logits[None], [path], noise, [position])
        return self.settled(choice, logits)

    def choices(
        self,
        logits: Tensor,
        paths: Sequence[Sequence[int]],
        noise: GumbelNoise | None,
        positions: Sequence[int],
    ) -> list[Choice]:
        """The token that follows each of W nodes, the lowest id among equals, by one wait for a device.

        Nothing is said of rows without a choice: `settled` does, of those that matter.

        Args:
            logits: [W, V] float32, bfloat16 or float16, not changed.
            paths: Of each node the tokens between the committed history and its logits.
            noise: Makes each token a sample of softmax(process(logits, path)); None: the greedy choice.
            positions: Absolute, of the tokens.
        """
        bare = not (self._rules or self._filters)  # then even the division is left to the kernel
        scores = logits if bare else self.draft_scores(logits, paths)
        least, last_tie = borders(scores, self.params) if self._filters else (None, None)
        picks = gumbel_argmax(
            scores,
            seed=noise.key if noise else None,
            positions=positions,
            temperature=self._temperature if bare else 1.0,
            least=least,
            last_tie=last_tie,
            noise=noise.row if noise else None,
            table=noise.table(positions) if noise else None,
        )
        return [Choice(*found) for found in zip(*(part.tolist() for part in download(*picks)), strict=True)]

    def settled(self, choice: Choice, logits: Tensor) -> tuple[int, float]:
        """The token that was chosen by logits [V], and its lead on the second best in nats.

        The lead is 0 for a tie, and inf when no other token is left.

        Raises:
            CheckpointError: The logits are not numbers.
            RequestError: The rules leave no token.
        """
        if choice.best == -math.inf and self.closes:
            raise self._closed(logits)
        _check_finite(choice.best)
        return choice.token, choice.best - choice.second

    def process(self, logits: Tensor, path: Sequence[int] = ()) -> Tensor:
        """The scores that `choose` chooses from: [V] any float -> [V] float32, filtered tokens -inf.

        At temperature 0 they are the penalised logits. The input is left as it is; the result may share its
        memory when nothing is to be done.
        """
        scores = self.draft_scores(logits[None], [path])[0]
        return keep_above(scores.clone(), *border(scores, self.params)) if self._filters else scores

    def distribution(self, logits: Tensor, path: Sequence[int] = ()) -> Tensor:
        """What the token that follows a node is a sample of: softmax(process), [V] float64 on the CPU.

        Raises CheckpointError when the logits are not numbers, RequestError where the rules leave no token.
        """
        _check_finite(float(logits.max()))
        scores = self.process(logits, path)
        if self.closes and float(scores.max()) == -math.inf:
            raise self._closed(logits)
        return torch.softmax(scores.cpu().double(), dim=0)

    def _closed(self, logits: Tensor) -> OffspecError:
        _check_finite(float(logits.max()))
        return RequestError(
            "the request closes every token: allowed_token_ids, bad_words, no_repeat_ngram_size, "
            "min_tokens and format leave none to choose"
        )

    @property
    def needs_paths(self) -> bool:
        """Whether scores depend on what was said, so that `draft_scores` needs paths."""
        return any(rule.needs_paths for rule in self._rules)

    @property
    def closes(self) -> bool:
        """Whether a rule may close tokens, and so leave a node without any."""
        return any(rule.closes for rule in self._rules)

    def logprobs(self, logits: Sequence[Tensor], tokens: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        """What the model itself says of tokens, before any rule or temperature; none unless asked for.

        logits: n rows [V] of any float, of the nodes that the tokens follow.
        """
        if self.params.logprobs is None:
            return ()
        ids, values = list[Tensor](), list[Tensor]()
        for row, token in zip(logits, tokens, strict=True):
            known = torch.log_softmax(row.float(), dim=0)
            top = torch.topk(known, min(self.params.logprobs, len(known)))
            ids.append(top.indices)
            values.append(torch.cat([known[token : token + 1], top.values]))
        found = zip(
            tokens, *(part.tolist() for part in download(torch.stack(ids), torch.stack(values))), strict=True
        )
        return tuple(
            TokenLogprobs(token, own, tuple(zip(listed, known, strict=True)))
            for token, listed, (own, *known) in found
        )

    def draft_scores(
        self, logits: Tensor, paths: Sequence[Sequence[int]], out: Tensor | None = None
    ) -> Tensor:
        """Rules and temperature without the filters: [W, V] any float -> [W, V] float32.

        A draft must not filter: its top_p would hide tokens that the target's keeps. What a rule closes is
        closed to both. Without `out` the
        result may share memory with the input when nothing is to be done; the input is left as it is. With
        it, [W, V] float32, the result is there; logits may then be of another width, since one family pads
        its heads to several: what they lack is -inf.
        """
        if out is not None:
            known = min(logits.shape[1], self.vocab_size)
            out[:, :known] = logits[:, :known]
            if known < self.vocab_size:
                out[:, known:] = -math.inf
        elif self._rules:
            out = logits.to(torch.float32, copy=True)
        scores = logits.float() if out is None else out
        for rule in self._rules:
            rule.apply(scores, paths)
        if self._temperature == 1.0:
            return scores
        # A tensor, since CUDA divides by a number by multiplying with its inverse, which rounds twice.
        divisor = torch.full((), self._temperature, device=scores.device)
        if scores is logits:
            return scores / divisor
        return scores.div_(divisor)  # in place: memory for [W, V] costs more than the division


def _check_finite(largest: float) -> None:
    """Raises CheckpointError for the largest of a target's logits, which a NaN among them would be."""
    if not math.isfinite(largest):
        raise CheckpointError(
            "the target's logits are not finite numbers: its weights are damaged, or overflow in this "
            "dtype; try float32"
        )
