"""Rules that a request sets for its tokens: each adds to a node's scores, or closes tokens.

A rule looks at the committed tokens and at the path to a node, and at nothing else, so target, draft and tree
read the same rules, and a node gets what it would get without a tree around it. The order is that of
transformers and vLLM: bias, penalties, then what is closed; temperature and filters come after all of them.

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


class Rule:
    """One rule of a request.

    needs_paths: whether `apply` looks at the paths it is given; they may be empty otherwise. closes: whether
    it makes tokens impossible.
    """

    needs_paths = False
    closes = False

    def apply(self, scores: Tensor, paths: Sequence[Sequence[int]]) -> None:
        """Change the scores [W, V] float32 of nodes, in place; paths: behind the committed tokens."""
        raise NotImplementedError

    def commit(self, tokens: Sequence[int]) -> None:
        """These tokens are output now, for every node; a rule that does not look at them leaves it so."""


def check_tokens(params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError where parameters name a token that is not one of V = `vocab_size`."""
    for name, tokens in (
        ("logit_bias", [token for token, _ in params.logit_bias]),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("stop_token_ids", params.stop_token_ids),
    ):
        if unknown := [token for token in tokens if not 0 <= token < vocab_size]:
            raise RequestError(
                f"{name} has the token {unknown[0]}: ids go from 0 to {vocab_size - 1}", field=name
            )


def rules_of(
    params: SamplingParams,
    vocab_size: int,
    prompt: Sequence[int],
    device: torch.device,
    *,
    ends: Collection[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> list[Rule]:
    """The rules that a request's parameters ask for, in the order in which they apply.

    Args:
        params: Of the request.
        vocab_size: V.
        prompt: Token ids that come before the output.
        device: Of the scores.
        ends: Tokens that end the answer, beside `params.stop_token_ids`.
        bad_words: `params.bad_words` in tokens.

    Raises:
        RequestError: A token that the vocabulary does not have, or nothing that is allowed.
    """
    check_tokens(params, vocab_size)
    found = list[Rule]()
    if params.logit_bias:
        found.append(LogitBias(dict(params.logit_bias), device))
    if params.penalises:
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


class LogitBias(Rule):
    """Adds a number to the logits of some tokens."""

    def __init__(self, bias: Mapping[int, float], device: torch.device) -> None:
        self._tokens = torch.tensor(list(bias), dtype=torch.int64, device=device)
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)

    def apply(self, scores: Tensor, paths: Sequence[Sequence[int]]) -> None:
        scores[:, self._tokens] += self._bias


class Penalties(Rule):
    """Repetition penalty (of prompt and output), presence and frequency penalties (of the output)."""

    needs_paths = True

    def __init__(self, params: SamplingParams, prompt: Sequence[int], device: torch.device) -> None:
        self._params, self._device = params, device
        # Times each seen token was put out; 0 for one that only the prompt holds.
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
        # The tokens of a path again, from their raw scores, with its own counts on top of the history's.
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
        """Penalised scores of tokens that were seen; counts are of the output alone."""
        params = self._params
        if params.repetition_penalty != 1.0:
            penalty = params.repetition_penalty
            scores = torch.where(scores < 0, scores * penalty, scores / penalty)
        return scores - counts * params.frequency_penalty - (counts > 0) * params.presence_penalty


class AllowedTokens(Rule):
    """Closes every token but some."""

    closes = True

    def __init__(self, tokens: Collection[int], vocab_size: int, device: torch.device) -> None:
        self._closed = torch.ones(vocab_size, dtype=torch.bool, device=device)
        self._closed[list(tokens)] = False

    def apply(self, scores: Tensor, paths: Sequence[Sequence[int]]) -> None:
        scores.masked_fill_(self._closed, -math.inf)


class MinTokens(Rule):
    """Closes the tokens that end an answer until so many were put out."""

    needs_paths = True
    closes = True

    def __init__(self, least: int, ends: Collection[int], device: torch.device) -> None:
        self._left = least
        self._ends = torch.tensor(sorted(ends), dtype=torch.int64, device=device)

    def apply(self, scores: Tensor, paths: Sequence[Sequence[int]]) -> None:
        for node, path in enumerate(paths):
            if len(path) < self._left:
                scores[node, self._ends] = -math.inf

    def commit(self, tokens: Sequence[int]) -> None:
        self._left -= len(tokens)


class BadWords(Rule):
    """Closes the last token of a sequence where the others came just before it."""

    needs_paths = True
    closes = True

    def __init__(self, words: Sequence[Sequence[int]], prompt: Sequence[int]) -> None:
        self._words = [tuple(word) for word in words if word]
        self._keep = max((len(word) - 1 for word in self._words), default=0)
        self._tail = list(prompt)[-self._keep :] if self._keep else []

    def apply(self, scores: Tensor, paths: Sequence[Sequence[int]]) -> None:
        closed = list[tuple[int, int]]()
        for node, path in enumerate(paths):
            before = (*self._tail, *path)
            closed += [(node, word[-1]) for word in self._words if _ends_with(before, word[:-1])]
        _close(scores, closed)

    def commit(self, tokens: Sequence[int]) -> None:
        if self._keep:
            self._tail = [*self._tail, *tokens][-self._keep :]


def _close(scores: Tensor, tokens: Sequence[tuple[int, int]]) -> None:
    if tokens:
        (found,) = upload([tokens], scores.device)
        scores[found[:, 0], found[:, 1]] = -math.inf


def _ends_with(tokens: Sequence[int], last: Sequence[int]) -> bool:
    return not last or tuple(tokens[-len(last) :]) == tuple(last)


class NoRepeatNgram(Rule):
    """Closes tokens that would complete a sequence of n tokens that was there before, prompt included."""

    needs_paths = True
    closes = True

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
        _close(scores, closed)

    def commit(self, tokens: Sequence[int]) -> None:
        recent = [*self._tail, *tokens]
        for before, token in self._ngrams(recent):
            self._next[before].add(token)
        self._tail = recent[len(recent) - self._size + 1 :] if len(recent) >= self._size else recent

    def _ngrams(self, tokens: Sequence[int]) -> list[tuple[tuple[int, ...], int]]:
        behind = self._size - 1
        return [(tuple(tokens[end - behind : end]), tokens[end]) for end in range(behind, len(tokens))]
