"""From logits to the next token: rules, temperature, filters, and the pick.

Each node of a token tree has a history of its own: the committed tokens, then the path to the node. The
order is transformers': the rules (`sampling.rules`), temperature, top_k, top_p, min_p. Every step is
elementwise or compares with a threshold, and a row is processed alone, so what a node gets does not depend on
the tree around it.

Letters: V vocabulary, W nodes.
"""

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from offspec.core.config import SamplingParams
from offspec.core.errors import CheckpointError, OffspecError, RequestError
from offspec.core.events import TokenLogprobs
from offspec.sampling.noise import GumbelNoise
from offspec.sampling.rules import rules_of
from offspec_kernels.gumbel_argmax import gumbel_argmax, keep_above

Border = tuple[Tensor, Tensor | None]  # the `least` and `last_tie` of `keep_above`, [1] each

# Logits divided by less than this could overflow float32. Two float32 logits that differ are then at least
# 10^10 apart, far beyond any noise: the sample is the greedy token, as it would be at a lower temperature.
_COLDEST = 1e-20
_HOTTEST = 1e38  # near the largest float32; all tokens are as likely, as they would be beyond

# How many of the likeliest tokens top_p looks at before it sorts the whole vocabulary, which takes
# milliseconds on a CPU.
_PREFIXES = (256, 4096)


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
    ) -> None:
        """See `rules_of`. Raises RequestError."""
        self.params = params
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        # Greedy scores are not divided.
        self._temperature = 1.0 if params.greedy else min(max(params.temperature, _COLDEST), _HOTTEST)
        self._filters = not params.greedy and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)
        self._rules = rules_of(params, vocab_size, prompt, self.device, ends=ends, bad_words=bad_words)

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
        """The token that follows one node, the lowest id among equals, and its lead on the second best in
        nats.

        The lead is 0 for a tie, and inf when no other token is left.

        Args:
            logits: [V] float32, bfloat16 or float16, not changed.
            path: Tokens between the committed history and the logits.
            noise: Makes the token a sample of softmax(process(logits, path)); None: the greedy choice.
            position: Absolute, of the token.

        Raises:
            CheckpointError: The logits are not numbers.
            RequestError: The rules leave no token.
        """
        bare = not (self._rules or self._filters)  # then even the division is left to the kernel
        scores = logits[None] if bare else self.draft_scores(logits[None], [path])
        least, last_tie = self._border(scores[0]) if self._filters else (None, None)
        picks = gumbel_argmax(
            scores,
            seed=noise.key if noise else None,
            positions=[position],
            temperature=self._temperature if bare else 1.0,
            least=least,
            last_tie=last_tie,
            noise=noise.row if noise else None,
        )
        best = float(picks.best)
        if best == -math.inf and self.closes:
            raise self._closed(logits)
        _check_finite(best)
        return int(picks.token), best - float(picks.second)

    def process(self, logits: Tensor, path: Sequence[int] = ()) -> Tensor:
        """The scores that `choose` chooses from: [V] any float -> [V] float32, filtered tokens -inf.

        At temperature 0 they are the penalised logits. The input is left as it is; the result may share its
        memory when nothing is to be done.
        """
        scores = self.draft_scores(logits[None], [path])[0]
        return keep_above(scores.clone(), *self._border(scores)) if self._filters else scores

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
            "the request closes every token: allowed_token_ids, bad_words, no_repeat_ngram_size and "
            "min_tokens leave none to choose"
        )

    @property
    def needs_paths(self) -> bool:
        """Whether scores depend on what was said, so that `draft_scores` needs paths."""
        return any(rule.needs_paths for rule in self._rules)

    @property
    def closes(self) -> bool:
        """Whether a rule may close tokens, and so leave a node without any."""
        return any(rule.closes for rule in self._rules)

    def logprobs(self, logits: Tensor, token: int) -> TokenLogprobs | None:
        """What the model itself says of a token, before any rule or temperature; None unless asked for.

        logits: [V] any float, of the node that the token follows.
        """
        if self.params.logprobs is None:
            return None
        known = torch.log_softmax(logits.float(), dim=0)
        top = torch.topk(known, min(self.params.logprobs, len(known)))
        likeliest = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return TokenLogprobs(token, float(known[token]), tuple(likeliest))

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

    def _border(self, scores: Tensor) -> Border:
        """Where top_k, top_p and min_p, one after the other, cut a row [V] float32."""
        params = self.params
        border: Border = scores.new_full((1,), -math.inf), None
        kept = scores
        if 0 < params.top_k < self.vocab_size:
            border = torch.topk(scores, params.top_k).values[-1:], None  # all equals are kept
            kept = keep_above(scores.clone(), *border)
        if params.top_p < 1.0:
            border = _top_p(kept, params.top_p) or border
        if params.min_p > 0.0:
            # p < min_p * p_max, without a softmax.
            border = _raised(border, scores.amax(dim=0, keepdim=True) + math.log(params.min_p))
        return border


def _check_finite(largest: float) -> None:
    """Raises CheckpointError for the largest of a target's logits, which a NaN among them would be."""
    if not math.isfinite(largest):
        raise CheckpointError(
            "the target's logits are not finite numbers: its weights are damaged, or overflow in this "
            "dtype; try float32"
        )


def _raised(border: Border, floor: Tensor) -> Border:
    """The higher of the two. A floor keeps all that equal it, if it is above the border."""
    least, last_tie = border
    if last_tie is not None:
        last_tie = last_tie.masked_fill(floor > least, torch.iinfo(torch.int64).max)
    return torch.maximum(least, floor), last_tie


def _top_p(scores: Tensor, top_p: float) -> Border | None:
    """The border of the smallest set of likeliest tokens whose probability reaches top_p, scores [V].

    Of tokens that are equally likely at the border, those with the lowest ids are kept. None: all are.
    """
    (size,) = scores.shape
    logsum = torch.logsumexp(scores.double(), dim=0)
    for length in (*(n for n in _PREFIXES if n < size), size):
        ranked = torch.topk(scores, length).values  # descending
        # Summed on the CPU: a GPU's scan does not add in the same order every time.
        reached = (ranked.double() - logsum).cpu().exp_().cumsum(dim=0) >= top_p
        count = int(length - reached.sum()) + 1  # tokens to keep
        if count <= length:
            break
    else:
        return None  # rounding: not even all of them reach top_p
    least = ranked[count - 1 : count]
    ties = (scores == least).nonzero()[:, 0]  # ascending ids
    kept_ties = count - int((ranked[:count] > least).sum())
    return least, ties[kept_ties - 1 : kept_ties] if kept_ties < len(ties) else None
