"""Token trees and their growth: invariants, and best-first growth finds the most likely paths."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offspec.draft.grow.best_first import grow
from offspec.draft.grow.tree_grower import GrowthPolicy
from offspec.draft.growing_tree import GrowingTree, Subtree
from offspec.draft.mix.mixture import Mixture
from offspec.draft.mix.weights import MixtureWeights
from offspec.sampling.token_tree import TokenTree
from offspec_planners.acceptance import TemperatureFit
from tests.support.table_drafter import VOCABULARY, TableDrafter, greedy_scorer, random_table


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    count = draw(st.integers(1, 30))
    parent, token, score = [-1], [0], [0.0]
    taken: set[tuple[int, int]] = set()
    for node in range(1, count):
        above = draw(st.integers(0, node - 1))
        word = draw(st.integers(0, 50).filter(lambda w, above=above: (above, w) not in taken))
        taken.add((above, word))
        parent.append(above)
        token.append(word)
        score.append(score[above] - draw(st.floats(0, 3)))
    return TokenTree.build(token, parent, score)


@settings(max_examples=50)
@given(trees())
def test_ancestors_and_paths_agree(tree: TokenTree) -> None:
    seen = tree.ancestors()
    for node in range(len(tree)):
        path = tree.path(node)
        assert set(np.flatnonzero(seen[node])) == {0, *path}
        assert len(path) == tree.depth[node]
        assert tree.path_tokens(node) == [tree.token[step] for step in path]
        for token, child in tree.children(node).items():
            assert tree.parent[child] == node and tree.token[child] == token
    if len(tree) > 2:
        broken = tree.parent.copy()
        broken[1] = len(tree) - 1
        with pytest.raises(AssertionError):
            TokenTree(tree.token, broken, tree.depth, tree.score, tree.source).check()


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_best_candidates_are_the_most_likely_paths(seed: int, budget: int) -> None:
    random = np.random.default_rng(seed)
    candidates = GrowingTree(3)
    for _ in range(random.integers(1, 12)):
        parent = int(random.integers(candidates.count))
        if not candidates.expanded_by[0, parent]:
            candidates.expanded_by[0, parent] = True
            probabilities = random.dirichlet(np.ones(4))
            candidates.extend(np.array([parent]), np.arange(4)[None], np.log(probabilities)[None])
    kept = candidates.best(budget)
    tree = candidates.tree(kept)
    tree.check()
    assert len(tree) == min(budget, candidates.count)
    left = np.setdiff1d(np.arange(candidates.count), kept)
    if len(left):
        assert candidates.score[left].max() <= tree.score.min() + 1e-12
    for node in range(len(tree)):
        assert tree.path_tokens(node) == candidates.path_tokens(int(kept[node]))


def test_arrays_grow_with_many_candidates() -> None:
    candidates = GrowingTree(0)
    for node in range(12):
        candidates.extend(np.array([node]), np.arange(100)[None], np.full((1, 100), -1.0))
    assert candidates.count == 1201
    candidates.tree(np.arange(candidates.count)).check()


def _brute_force(table: torch.Tensor, root: int, budget: int, depth: int) -> float:
    """Return the probability mass of the `budget` most likely paths, by listing all of them."""
    likely = torch.softmax(table.double(), dim=1).tolist()
    level, mass = [(root, 1.0)], [1.0]
    for _ in range(depth):
        level = [(t, p * likely[last][t]) for last, p in level for t in range(VOCABULARY)]
        mass += [p for _, p in level]
    return sum(sorted(mass, reverse=True)[:budget])


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 30), st.integers(1, 8))
def test_growth_finds_the_most_likely_paths(seed: int, budget: int, width: int) -> None:
    table, policy = random_table(seed), GrowthPolicy(budget, width, min_gain=0.0)
    grown = grow(Mixture.single(TableDrafter(table), greedy_scorer()), [0, 2], policy, max_depth=4)
    grown.tree.check()
    assert grown.tree.token[0] == 2 and grown.tree.depth.max() <= 4
    assert len(grown.tree) == budget or grown.tree.depth.max() == 4
    assert grown.tree.expected_tokens == pytest.approx(_brute_force(table, 2, budget, 4), rel=1e-5)


def test_growth_stops_if_a_step_does_not_pay() -> None:
    drafter = TableDrafter(random_table(1))
    steps = [
        grow(
            Mixture.single(drafter, greedy_scorer()), [2], GrowthPolicy(200, 2, min_gain=gain), max_depth=20
        ).steps
        for gain in (0.0, 0.02, 0.2)
    ]
    assert steps[0] > steps[1] > steps[2] >= 1
    assert all(len(nodes) <= 2 for nodes in drafter.steps)
    assert grow(Mixture.single(drafter, greedy_scorer()), [2], GrowthPolicy(200, 32), max_depth=0).steps == 0


def test_temperature_fit_converges() -> None:
    """Tokens drawn from softmax(x / 2): the fit must move from 1 to about 2."""
    random = np.random.default_rng(0)
    fit = TemperatureFit()
    for _ in range(2000):
        x = np.sort(random.normal(0, 2, 32))[::-1].astype(np.float32)
        truth = np.exp(x / 2) / np.exp(x / 2).sum()
        read = x / fit.tau - np.log(np.exp(x / fit.tau).sum())
        fit.observe(x, read.astype(np.float32), int(random.choice(32, p=truth)))
    assert fit.tau == pytest.approx(2.0, rel=0.15)


def test_misses_raise_the_fitted_temperature_moderately() -> None:
    fit = TemperatureFit()
    x = np.linspace(0, -8, 32).astype(np.float32)
    log_probs = (x - np.log(np.exp(x).sum())).astype(np.float32)
    for _ in range(1000):
        fit.observe(x, log_probs, None)
    assert 1.5 < fit.tau <= 5.0


def test_forced_tokens_have_probability_one() -> None:
    """A chain is added at once, over existing proposals, and later ones do not change it."""
    tree, blend = GrowingTree(0, 2), MixtureWeights(2, 1)
    tree.extend(np.array([0]), np.array([[4, 5]]), np.log([[0.5, 0.3]]), source=0, weights=blend)
    tree.graft(1, Subtree([-1, 0], [7, 8], [np.log(0.6), np.log(0.5)]), 1, blend)
    last = tree.append_forced(1, [7, 8, 9])
    assert tree.path_tokens(last) == [4, 7, 8, 9] and tree.score[last] == tree.score[1]
    assert tree.forced[: tree.count].tolist() == [False, True, False, True, True, False]
    tree.extend(np.array([1]), np.array([[7]]), np.log([[0.1]]), source=0, weights=blend)
    tree.graft(0, Subtree([-1, 0], [4, 7], [np.log(0.9), np.log(0.2)]), 1, blend)
    assert tree.score[last] == tree.score[1] < 0, "rescoring the parent may rescore this node"
    grown = tree.tree(np.arange(tree.count))
    grown.check()
    assert grown.source.tolist()[3:] == [2, 2, 2] and set(grown.source.tolist()[:3]) <= {0, 1}
