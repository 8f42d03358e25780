"""Selection of the next token from logits: rules, temperature, filters, and the pick.

Each node of a token tree has its own history: the committed tokens, then the path to the node. The order is
the one of transformers: rules (`sampling.logits_rules`), temperature, top_k, top_p, min_p. Every step is
elementwise or compares with a threshold, and each row is processed alone, so the result of a node does not
depend on the tree around it.

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
from offspec.sampling.filters import cutoff, cutoffs
from offspec.sampling.format_rule import ConstraintRule
from offspec.sampling.logits_rules import rules_of
from offspec.sampling.noise import GumbelNoise
from offspec_kernels.gumbel_argmax import gumbel_argmax, mask_below
from offspec_kernels.transfer import download

# Logits divided by less than this could overflow float32. Two different float32 logits are then at least
# 10^10 apart, far beyond any noise: the sample is the greedy token, as it would be at a lower temperature.
_MIN_TEMPERATURE = 1e-20
_MAX_TEMPERATURE = 1e38  # near the largest float32; all tokens are equally likely, as they would be above it


class PickedToken(NamedTuple):
    """Token with its noisy score, and the largest noisy score of the other tokens."""

    token: int
    best: float
    second: float


class LogitsProcessor:
    """Processor that applies `SamplingParams` to the logits of any node after one committed history.

    The path of a node consists of the tokens after the last committed token, the node's own token included.
    They count as output.
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
        format: ConstraintRule | None = None,
    ) -> None:
        """format: rule of the format in `params`. Other parameters: see `rules_of`. Raises RequestError."""
        self.params = params
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        # Greedy scores are not divided.
        self._temperature = (
            1.0 if params.greedy else min(max(params.temperature, _MIN_TEMPERATURE), _MAX_TEMPERATURE)
        )
        self._filters = not params.greedy and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)
        self._rules = rules_of(params, vocab_size, prompt, self.device, ends=ends, bad_words=bad_words)
        self.format = format
        if format is not None:
            self._rules.append(format)

    @property
    def uses_noise(self) -> bool:
        """Whether sampling uses noise; False for greedy decoding."""
        return not self.params.greedy

    def commit(self, tokens: Sequence[int]) -> None:
        """Add output tokens to the history of every node."""
        for rule in self._rules:
            rule.commit(tokens)

    def choose(
        self, logits: Tensor, path: Sequence[int], noise: GumbelNoise | None, position: int
    ) -> tuple[int, float]:
        """Return the token that follows one node, and its lead over the second best in nats.

        logits: [V]. For the other parameters and the errors see `choices` and `checked_pick`.
        """
        (choice,) = self.choices(logits[None], [path], noise, [position])
        return self.checked_pick(choice, logits)

    def choices(
        self,
        logits: Tensor,
        paths: Sequence[Sequence[int]],
        noise: GumbelNoise | None,
        positions: Sequence[int],
    ) -> list[PickedToken]:
        """Return the token that follows each of W nodes, with one device synchronization.

        Among ties the lowest id is chosen. Rows without an allowed token are not reported here; call
        `checked_pick` for the rows that are used.

        Args:
            logits: [W, V] float32, bfloat16 or float16, not modified.
            paths: Tokens of each node after the committed history.
            noise: Makes each token a sample of softmax(process(logits, path)); None for the greedy choice.
            positions: Absolute positions of the tokens.
        """
        bare = not (self._rules or self._filters)  # then the kernel even does the division
        scores = logits if bare else self.draft_scores(logits, paths)
        least, last_tie = cutoffs(scores, self.params) if self._filters else (None, None)
        picks = gumbel_argmax(
            scores,
            seed=noise.key if noise else None,
            positions=positions,
            temperature=self._temperature if bare else 1.0,
            min_score=least,
            last_tie=last_tie,
            noise=noise.row if noise else None,
            table=noise.table(positions) if noise else None,
        )
        return [
            PickedToken(*found) for found in zip(*(part.tolist() for part in download(*picks)), strict=True)
        ]

    def checked_pick(self, choice: PickedToken, logits: Tensor) -> tuple[int, float]:
        """Return the token that was chosen from logits [V], and its lead over the second best in nats.

        The lead is 0 for a tie, and inf if no other token is left.

        Raises:
            CheckpointError: The logits are not finite.
            RequestError: The rules leave no token.
        """
        if choice.best == -math.inf and self.may_mask_tokens:
            raise self._no_token_error(logits)
        _check_finite(choice.best)
        return choice.token, choice.best - choice.second

    def process(self, logits: Tensor, path: Sequence[int] = ()) -> Tensor:
        """Return the scores that `choose` uses: [V] any float -> [V] float32, filtered tokens -inf.

        At temperature 0 the scores are the penalized logits. The input is not modified; the result may share
        its memory if there is nothing to do.
        """
        scores = self.draft_scores(logits[None], [path])[0]
        return mask_below(scores.clone(), *cutoff(scores, self.params)) if self._filters else scores

    def distribution(self, logits: Tensor, path: Sequence[int] = ()) -> Tensor:
        """Return the distribution of the token that follows a node: softmax(process), [V] float64 on the CPU.

        Raises CheckpointError if the logits are not finite, and RequestError if the rules leave no token.
        """
        _check_finite(float(logits.max()))
        scores = self.process(logits, path)
        if self.may_mask_tokens and float(scores.max()) == -math.inf:
            raise self._no_token_error(logits)
        return torch.softmax(scores.cpu().double(), dim=0)

    def _no_token_error(self, logits: Tensor) -> OffspecError:
        _check_finite(float(logits.max()))
        return RequestError(
            "no token is allowed here: allowed_token_ids, bad_words, no_repeat_ngram_size, min_tokens and "
            "format together exclude all of them"
        )

    @property
    def needs_paths(self) -> bool:
        """Whether scores depend on earlier tokens, so that `draft_scores` needs paths."""
        return any(rule.needs_paths for rule in self._rules)

    @property
    def may_mask_tokens(self) -> bool:
        """Whether a rule may mask tokens, which can leave a node without any."""
        return any(rule.may_mask_tokens for rule in self._rules)

    def logprobs(self, logits: Sequence[Tensor], tokens: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        """Return the model's log-probabilities of tokens before any rule or temperature, if requested.

        logits: n rows [V] of any float, at the nodes that the tokens follow.
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

        A draft must not filter: its top_p would hide tokens that the target keeps. Masks of rules apply to
        both. Without `out` the result may share memory with the input if there is nothing to do; the input is
        not modified. With `out`, [W, V] float32, the result is stored there. The logits may then have another
        width, because one model family pads its heads to several sizes; missing logits become -inf.
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
        # A tensor, because CUDA divides by a number by multiplying with its inverse, which rounds twice.
        divisor = torch.full((), self._temperature, device=scores.device)
        if scores is logits:
            return scores / divisor
        return scores.div_(divisor)  # in place: memory for [W, V] costs more than the division


def _check_finite(largest: float) -> None:
    """Raise CheckpointError if the largest logit, which is NaN if any logit is NaN, is not finite."""
    if not math.isfinite(largest):
        raise CheckpointError(
            "the target's logits are not finite numbers: its weights are damaged, or overflow in this "
            "dtype; try float32"
        )
