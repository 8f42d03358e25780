"""Sequoia's rule is exact in fractions; the walk in floats decides as fractions do."""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import permutations
from math import prod
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offspec.core.config import SamplingParams
from offspec.core.errors import CheckpointError
from offspec.sampling.logits_processor import LogitsProcessor
from offspec.sampling.noise import uniform_stream
from offspec.sampling.token_tree import TokenTree
from offspec.sampling.verify import LazyLogits, VerifyResult
from offspec.sampling.verify_sequoia import accept_child, verify_without_replacement

Law = list[Fraction]


class ForcedOutcome:
    """Replaces a random number: a comparison has the outcome that the test chooses.

    odds: probability of this outcome for a random number.
    """

    def __init__(self, accepts: bool) -> None:
        self._accepts = accepts
        self._draft = self.odds = Fraction(1)

    def __mul__(self, draft: Fraction) -> "ForcedOutcome":
        self._draft = draft
        return self

    def __lt__(self, target: Fraction) -> bool:
        accepted = min(Fraction(1), target / self._draft)
        self.odds = accepted if self._accepts else 1 - accepted
        return self._accepts


def _distribution(*parts: int) -> Law:
    return [Fraction(part, sum(parts)) for part in parts]


def _outcomes(target: Law, draft: Law, children: Sequence[int]) -> Iterator[tuple[int, Fraction]]:
    """Every token that the rule may choose, and the probability of it."""
    laws = np.array(target, dtype=object), np.array(draft, dtype=object)
    for first in range(len(children) + 1):  # the test that passes, after which there are none
        told = [ForcedOutcome(test == first) for test in range(len(children))]
        accepted, rest = accept_child(*laws, children, cast(Iterator[float], iter(told)))
        odds = prod((number.odds for number in told), start=Fraction(1))
        if accepted is not None:
            yield accepted, odds
        elif odds:
            yield from ((token, odds * share) for token, share in enumerate(rest))


def _draws(draft: Law, count: int) -> Iterator[tuple[tuple[int, ...], Fraction]]:
    """Every order in which up to `count` children can be drawn, with its probability."""
    possible = [token for token, share in enumerate(draft) if share]
    for order in permutations(possible, min(count, len(possible))):
        odds, left = Fraction(1), Fraction(1)
        for token in order:
            odds *= draft[token] / left
            left -= draft[token]
        yield order, odds


def _chosen(target: Law, draft: Law, count: int) -> Law:
    """Probability of each token, over all draws and all outcomes of the tests."""
    law = [Fraction(0)] * len(target)
    for children, odds in _draws(draft, count):
        for token, share in _outcomes(target, draft, children):
            law[token] += odds * share
    return law


_PARTS = st.lists(st.integers(0, 6), min_size=3, max_size=4).filter(any)


@settings(max_examples=40, deadline=None)
@given(_PARTS, _PARTS, st.integers(1, 3))
@example([3, 2, 1], [3, 2, 1], 2)  # equal
@example([0, 0, 1, 2], [3, 1, 0, 0], 3)  # disjoint
@example([1, 2, 3, 4], [1, 0, 0, 0], 2)  # a certain draft
@example([0, 1, 0], [4, 1, 3], 3)  # a certain target
@example([7, 2, 1, 1], [1, 1, 2, 9], 3)  # opposite
def test_node_has_exactly_the_targets_distribution(target: list[int], draft: list[int], count: int) -> None:
    size = max(len(target), len(draft))
    laws = [_distribution(*parts, *[0] * (size - len(parts))) for parts in (target, draft)]
    assert _chosen(laws[0], laws[1], count) == laws[0]


def test_excess_lost_to_rounding_changes_nothing() -> None:
    """Rounding puts the draft above the target at the one child, and below it nowhere."""
    target, draft = np.array([0.5, 0.5]), np.array([0.5 + 2.0**-53, 0.5])
    token, rest = accept_child(target, draft, [0], iter([1 - 2.0**-53, 0.3]))
    assert token is None and rest.tolist() == [0.5, 0.5]


def _processor(size: int, temperature: float = 1.0) -> LogitsProcessor:
    return LogitsProcessor(SamplingParams(temperature=temperature), size, [])


class Scripted:
    """A pass over a random tree: distributions in fractions, whose logarithms are used in floats.

    shape: number of children of each of the first nodes.
    """

    def __init__(self, seed: int, size: int, shape: Sequence[int]) -> None:
        random = np.random.default_rng(seed)
        tokens, parents = [0], [-1]
        for place, children in enumerate(shape):
            tokens += random.permutation(size)[:children].tolist()
            parents += [place] * children
        self.tree = TokenTree.build(tokens, parents, [0.0] * len(tokens))
        self.targets, self.drafts = (
            [_distribution(*random.integers(1, 9, size).tolist()) for _ in tokens] for _ in range(2)
        )
        self.chances = {position: random.random(8).tolist() for position in range(5)}

    def walk(self, processor: LogitsProcessor) -> VerifyResult:
        return verify_without_replacement(
            self.tree,
            LazyLogits(self.tree, lambda nodes: torch.stack([_logits(self.targets[n]) for n in nodes]), 3),
            processor,
            lambda node: _logits(self.drafts[node]),
            lambda position: iter(self.chances[position]),
            0,
            lambda token: False,
        )

    def reference(self) -> list[int]:
        """Return the tokens chosen in fractions with the same numbers, by the published rule."""
        node, said = 0, list[int]()
        while True:
            target, draft = self.targets[node], self.drafts[node]
            children = {
                int(self.tree.token[at]): at for at in range(len(self.tree)) if self.tree.parent[at] == node
            }
            numbers = iter([Fraction(chance) for chance in self.chances[len(said) + 1]])
            token: int | None = None
            for child in children:
                if next(numbers) < target[child] / draft[child]:
                    token = child
                    break
                excess = [max(r - d, Fraction(0)) for r, d in zip(target, draft, strict=True)]
                target = [share / sum(excess) for share in excess]
                draft = [Fraction(0) if at == child else d / (1 - draft[child]) for at, d in enumerate(draft)]
            if token is None:
                share = next(numbers)
                token = next(at for at in range(len(target)) if sum(target[: at + 1]) > share)
            said.append(token)
            if token not in children:
                return said
            node = children[token]


def _logits(law: Law) -> torch.Tensor:
    return torch.tensor([float(share) for share in law]).log()


@pytest.mark.parametrize("shape", [(3, 2, 1, 3), (2, 2, 2), (1, 1), (3,)])
def test_float_walk_equals_exact_walk(shape: tuple[int, ...]) -> None:
    lengths = set[int]()
    for seed in range(60):
        pass_ = Scripted(seed, 4, shape)
        walked = pass_.walk(_processor(4))
        assert list(walked.tokens) == pass_.reference()
        assert len(walked.nodes) == len(walked.tokens) == len(walked.logit_gaps) and not walked.stopped
        lengths.add(len(walked.tokens))
    assert {1, 2} <= lengths


def _walk(
    tree: TokenTree,
    target: torch.Tensor,
    draft: torch.Tensor,
    numbers: Callable[[int], Iterator[float]] = lambda position: uniform_stream(5, "test", position),
    stop: Callable[[int], bool] = lambda token: False,
    temperature: float = 1.0,
) -> VerifyResult:
    """Run a pass from position 10 in which all rows are the same."""
    processor = _processor(len(target), temperature)
    rows = LazyLogits(tree, lambda nodes: target.expand(len(nodes), -1), 2)
    return verify_without_replacement(tree, rows, processor, lambda node: draft, numbers, 10, stop)


def _tree(parents: Sequence[int], tokens: Sequence[int]) -> TokenTree:
    return TokenTree.build([0, *tokens], [-1, *parents], [0.0] * (1 + len(tokens)))


def test_every_comparison_uses_a_new_number() -> None:
    """All children of the root are rejected, and then the token is drawn: four numbers of one position."""
    taken: list[tuple[int, float]] = []

    def numbers(position: int) -> Iterator[float]:
        for number in uniform_stream(5, "test", position):
            taken.append((position, number))
            yield number

    target = torch.tensor([-torch.inf] * 3 + [0.0, 0.0])
    draft = torch.tensor([0.0] * 3 + [-torch.inf] * 2)
    walked = _walk(_tree([0, 0, 0], [2, 0, 1]), target, draft, numbers)
    assert walked.tokens[0] in (3, 4)
    assert len(taken) == len({number for _, number in taken}) == 4
    assert {position for position, _ in taken} == {11}


def test_non_finite_values_are_reported() -> None:
    target = torch.tensor([0.0, torch.nan, 1.0])
    with pytest.raises(CheckpointError, match="not finite"):
        _walk(TokenTree.single(0), target, target)


def test_walk_stops_at_stop_tokens() -> None:
    """The token that ends it is emitted; its node is not accepted."""
    sure = torch.tensor([-torch.inf, 0.0, -torch.inf])
    tree = _tree([0, 1], [1, 1])
    walked = _walk(tree, sure, sure, stop=lambda token: True)
    assert (walked.tokens, walked.nodes, walked.stopped) == ((1,), (0,), True)
    walked = _walk(tree, sure, sure)
    assert (walked.tokens, walked.nodes, walked.stopped) == ((1, 1, 1), (0, 1, 2), False)


def test_exhausted_draft_does_not_end_the_walk() -> None:
    """At this low temperature floats leave one token: the second child cannot be tested, only drawn."""
    target, draft = torch.tensor([0.0, 9.0, 18.0]), torch.tensor([0.0, 18.0, 9.0])
    walked = _walk(_tree([0, 0, 2], [1, 2, 2]), target, draft, temperature=0.001)
    assert walked.tokens == (2, 2, 2) and walked.nodes == (0, 2, 3)
