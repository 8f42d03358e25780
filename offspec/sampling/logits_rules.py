"""Logits rules of a request, each of which changes a node's scores or masks tokens.

A rule depends only on the committed tokens and on the path to a node. So target, draft and tree growth see
the same rules, and a node's scores do not depend on the tree around it. The order follows transformers and
vLLM: bias, penalties, masks; temperature and filters come afterwards.

Letters: V vocabulary, W nodes.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from offspec.core.config import SamplingParams
from offspec.core.errors import RequestError
from offspec_kernels.transfer import upload


class LogitsRule:
    """Logits rule of a request.

    needs_paths: whether `apply` uses its paths, which may be empty otherwise. may_mask_tokens: whether the
    rule can make tokens impossible.
    """

    needs_paths = False
    may_mask_tokens = False

    def apply(self, scores: Tensor, paths: Sequence[Sequence[int]]) -> None:
        """Change the scores [W, V] float32 of nodes in place. paths: tokens after the committed ones."""
        raise NotImplementedError

    def commit(self, tokens: Sequence[int]) -> None:
        """Add committed output tokens. The default does nothing, for rules that do not use them."""


def check_tokens(params: SamplingParams, vocab_size: int) -> None:
    """Raise RequestError if parameters name a token outside of the vocabulary of size `vocab_size`."""
    for name, tokens in (
        ("logit_bias", [token for token, _ in params.logit_bias]),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("stop_token_ids", params.stop_token_ids),
    ):
        if unknown := [token for token in tokens if not 0 <= token < vocab_size]:
            raise RequestError(
                f"{name}: invalid token id {unknown[0]}, ids go from 0 to {vocab_size - 1}", field=name
            )


def rules_of(
    params: SamplingParams,
    vocab_size: int,
    prompt: Sequence[int],
    device: torch.device,
    *,
    ends: Collection[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> list[LogitsRule]:
    """Return the rules for a request's parameters, in the order in which they apply.

    Args:
        params: Parameters of the request.
        vocab_size: V.
        prompt: Token ids that precede the output.
        device: Device of the scores.
        ends: Tokens that end the answer, in addition to `params.stop_token_ids`.
        bad_words: `params.bad_words` in tokens.

    Raises:
        RequestError: A token is not in the vocabulary.
    """
    check_tokens(params, vocab_size)
    found = list[LogitsRule]()
    if params.logit_bias:
        found.append(LogitBias(dict(params.logit_bias), device))
    if params.has_penalties:
        found.append(Penalties(params, prompt, device))
    if params.allowed_token_ids is not None:
        found.append(AllowedTokens(params.allowed_token_ids, vocab_size, device))
    if params.no_repeat_ngram_size:
        found.append(NoRepeatNgram(params.no_repeat_ngram_size, prompt))
    if bad_words:
        found.append(BadWords(bad_words, prompt))
    if params.min_tokens:
        found.append(MinTokens(params.min_tokens, {*ends, *params.stop_token_ids}, device))
    return found


class LogitBias(LogitsRule):
    """Rule that adds a bias to the logits of some tokens."""

    def __init__(self, bias: Mapping[int, float], device: torch.device) -> None:
        self._tokens = torch.tensor(list(bias), dtype=torch.int64, device=device)
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)

    def apply(self, scores: Tensor, paths: Sequence[Sequence[int]]) -> None:
        scores[:, self._tokens] += self._bias


class Penalties(LogitsRule):
    """Repetition penalty (of prompt and output), presence and frequency penalties (of the output)."""

    needs_paths = True

    def __init__(self, params: SamplingParams, prompt: Sequence[int], device: torch.device) -> None:
        self._params, self._device = params, device
        # Number of times each seen token was output; 0 for tokens that are only in the prompt.
        self._counts: Counter[int] = Counter(dict.fromkeys(prompt, 0))
        self._tables: tuple[Tensor, Tensor] | None = None

    def commit(self, tokens: Sequence[int]) -> None:
        self._counts.update(tokens)
        self._tables = None

    def apply(self, scores: Tensor, paths: Sequence[Sequence[int]]) -> None:
        if self._tables is None:
            known = np.array(list(self._counts), np.int64), np.array(list(self._counts.values()), np.float32)
            tokens, counts = upload(known, self._device)
            self._tables = tokens, counts
        # Tokens of a path are recomputed from their raw scores, with the path's counts added to the
        # history's.
        hits = [
            (node, token, self._counts[token] + times)
            for node, path in enumerate(paths)
            for token, times in Counter(path).items()
        ]
        (found,) = upload([np.array(hits, np.int64).reshape(-1, 3)], self._device)
        nodes, of_path, times = found.unbind(1)
        on_path = self._lowered(scores[nodes, of_path], times.float())
        tokens, counts = self._tables
        scores[:, tokens] = self._lowered(scores[:, tokens], counts)
        scores[nodes, of_path] = on_path

    def _lowered(self, scores: Tensor, counts: Tensor) -> Tensor:
        """Return the penalized scores of seen tokens. counts: occurrences in the output only."""
        params = self._params
        if params.repetition_penalty != 1.0:
            penalty = params.repetition_penalty
            scores = torch.where(scores < 0, scores * penalty, scores / penalty)
        return scores - counts * params.frequency_penalty - (counts > 0) * params.presence_penalty


class AllowedTokens(LogitsRule):
    """Rule that masks all tokens except the allowed ones."""

    may_mask_tokens = True

    def __init__(self, tokens: Collection[int], vocab_size: int, device: torch.device) -> None:
        self._closed = torch.ones(vocab_size, dtype=torch.bool, device=device)
        self._closed[list(tokens)] = False

    def apply(self, scores: Tensor, paths: Sequence[Sequence[int]]) -> None:
        scores.masked_fill_(self._closed, -math.inf)


class MinTokens(LogitsRule):
    """Rule that masks the tokens that end an answer until it has a minimum length."""

    needs_paths = True
    may_mask_tokens = True

    def __init__(self, least: int, ends: Collection[int], device: torch.device) -> None:
        self._left = least
        self._ends = torch.tensor(sorted(ends), dtype=torch.int64, device=device)

    def apply(self, scores: Tensor, paths: Sequence[Sequence[int]]) -> None:
        for node, path in enumerate(paths):
            if len(path) < self._left:
                scores[node, self._ends] = -math.inf

    def commit(self, tokens: Sequence[int]) -> None:
        self._left -= len(tokens)


class BadWords(LogitsRule):
    """Rule that masks the last token of a sequence if its other tokens came just before."""

    needs_paths = True
    may_mask_tokens = True

    def __init__(self, words: Sequence[Sequence[int]], prompt: Sequence[int]) -> None:
        self._words = [tuple(word) for word in words if word]
        self._keep = max((len(word) - 1 for word in self._words), default=0)
        self._tail = list(prompt)[-self._keep :] if self._keep else []

    def apply(self, scores: Tensor, paths: Sequence[Sequence[int]]) -> None:
        closed = list[tuple[int, int]]()
        for node, path in enumerate(paths):
            before = (*self._tail, *path)
            closed += [(node, word[-1]) for word in self._words if _ends_with(before, word[:-1])]
        _mask_tokens(scores, closed)

    def commit(self, tokens: Sequence[int]) -> None:
        if self._keep:
            self._tail = [*self._tail, *tokens][-self._keep :]


def _mask_tokens(scores: Tensor, tokens: Sequence[tuple[int, int]]) -> None:
    if tokens:
        (found,) = upload([tokens], scores.device)
        scores[found[:, 0], found[:, 1]] = -math.inf


def _ends_with(tokens: Sequence[int], last: Sequence[int]) -> bool:
    return not last or tuple(tokens[-len(last) :]) == tuple(last)


class NoRepeatNgram(LogitsRule):
    """Rule that masks tokens that would repeat an n-gram of the prompt or the output."""

    needs_paths = True
    may_mask_tokens = True

    def __init__(self, size: int, prompt: Sequence[int]) -> None:
        self._size = size
        self._next: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        self._tail = list[int]()  # the last size - 1 committed tokens
        self.commit(prompt)

    def apply(self, scores: Tensor, paths: Sequence[Sequence[int]]) -> None:
        behind, closed = self._size - 1, list[tuple[int, int]]()
        for node, path in enumerate(paths):
            recent = [*self._tail, *path]
            if len(recent) < behind:
                continue
            last = tuple(recent[len(recent) - behind :])
            closed += [(node, token) for token in self._next.get(last, ())]
            closed += [(node, token) for before, token in self._ngrams(recent) if before == last]
        _mask_tokens(scores, closed)

    def commit(self, tokens: Sequence[int]) -> None:
        recent = [*self._tail, *tokens]
        for before, token in self._ngrams(recent):
            self._next[before].add(token)
        self._tail = recent[len(recent) - self._size + 1 :] if len(recent) >= self._size else recent

    def _ngrams(self, tokens: Sequence[int]) -> list[tuple[tuple[int, ...], int]]:
        behind = self._size - 1
        return [(tuple(tokens[end - behind : end]), tokens[end]) for end in range(behind, len(tokens))]
