"""Several sources in one tree: merging, mixture weights, and payoff."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offspec.draft.base import Children, Scorer
from offspec.draft.grow.best_first import grow
from offspec.draft.grow.tree_grower import GrowthPolicy
from offspec.draft.growing_tree import GrowingTree, Subtree
from offspec.draft.mix.mixture import GrowthStats, Mixture, Source, SourceStats
from offspec.draft.mix.payoff import Backoff
from offspec.draft.mix.weights import MixtureWeights
from offspec.sampling.token_tree import ROOT
from tests.support.table_drafter import ChainLookup, TableDrafter, greedy_scorer, random_table

WORDS = 12


def _subtree(random: np.random.Generator) -> Subtree:
    parents: list[int] = []
    taken: set[tuple[int, int]] = set()
    tokens: list[int] = []
    for index in range(int(random.integers(1, 8))):
        parent, token = int(random.integers(-1, index)) if index else -1, int(random.integers(6))
        if (parent, token) in taken:
            parent, token = index - 1, 0
        taken.add((parent, token))
        parents.append(parent)
        tokens.append(token)
    return Subtree(parents, tokens, np.log(random.uniform(0.1, 0.9, len(tokens))).tolist())


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 100_000))
def test_node_scores_are_path_probabilities(seed: int) -> None:
    """Compared with the definition: mixed probabilities of all siblings, summed along the path.
    Siblings are distinct.
    """
    random = np.random.default_rng(seed)
    candidates, blend = GrowingTree(5, 3), MixtureWeights(3, lookups_from=2)
    for _ in range(12):
        source = int(random.integers(3))
        asked = candidates.expanded_by[source, : candidates.count]
        if asked.all():
            continue
        if source == 2:
            node = int(random.choice(np.flatnonzero(~asked)))
            subtree = _subtree(random)
            if any(candidates.expanded_by[2, child] for child in _below(candidates, node)):
                continue
            candidates.graft(node, subtree, 2, blend)
        else:
            nodes = np.flatnonzero(~asked)[: int(random.integers(1, 4))]
            tokens = np.stack([random.permutation(6)[:4] for _ in nodes])
            log_probs = np.log(random.dirichlet(np.ones(5), len(nodes))[:, :4])
            log_probs[random.random(log_probs.shape) < 0.1] = -np.inf
            candidates.extend(nodes, tokens, log_probs, -np.inf, source, blend)
            candidates.expanded_by[source, nodes] = True
    parents = candidates.parent[: candidates.count]
    assert (parents[1:] < np.arange(1, candidates.count)).all()
    pairs = set(zip(parents.tolist(), candidates.token[: candidates.count].tolist(), strict=True))
    assert len(pairs) == candidates.count
    for node in range(1, candidates.count):
        above = int(parents[node])
        siblings = candidates.children(above)
        said = candidates.source_log_probs[:, siblings]
        spoke = np.asarray(~np.isnan(said).all(axis=1))
        assert (np.isnan(said) == ~spoke[:, None]).all(), "a source scores all siblings or none"
        blended = np.minimum(blend.combine(said), 0.0)
        given_parent = said[spoke][0] if spoke.sum() == 1 else blended
        expected = candidates.score[above] + given_parent[siblings.tolist().index(node)]
        assert candidates.score[node] == pytest.approx(expected, abs=1e-5)
        assert candidates.depth[node] == candidates.depth[above] + 1
    candidates.tree(candidates.best(20)).check()


def _below(candidates: GrowingTree, node: int) -> list[int]:
    """Return all descendants of a node."""
    found = [node]
    for other in range(node + 1, candidates.count):
        if int(candidates.parent[other]) in found:
            found.append(other)
    return found[1:]


def test_lookup_leaves_the_remaining_probability_to_others() -> None:
    """The lookup gives 0.6 and leaves 0.4, distributed by the drafter; it has a sixth of the weight."""
    said = np.array([np.log([0.9, 0.1]), [np.log(0.6), -np.inf]], np.float32)
    likely = np.exp(MixtureWeights(2, lookups_from=1).combine(said))
    assert likely == pytest.approx([5 / 6 * 0.9 + (0.6 + 0.4 * 0.9) / 6, 5 / 6 * 0.1 + 0.4 * 0.1 / 6])


def test_source_that_did_not_expand_a_node_is_ignored() -> None:
    """Two of three sources expand the root; the third was not called, so it does not count."""
    tree, blend = GrowingTree(5, 3), MixtureWeights(3, lookups_from=3)
    tree.extend(np.array([0]), np.array([[1, 2]]), np.log([[0.6, 0.3]]), -np.inf, 0, blend)
    tree.extend(np.array([0]), np.array([[2, 3]]), np.log([[0.5, 0.4]]), -np.inf, 1, blend)
    assert np.isnan(tree.source_log_probs[2, : tree.count]).all()
    assert np.isneginf(tree.source_log_probs[0, 3]) and np.isneginf(tree.source_log_probs[1, 1])


def test_weights_follow_the_better_source() -> None:
    random = np.random.default_rng(1)
    blend = MixtureWeights(2, lookups_from=2)
    good, bad = np.array([0.8, 0.1, 0.05]), np.array([0.1, 0.1, 0.7])
    said = np.log(np.stack([bad, good])).astype(np.float32)
    before = np.exp(blend.combine(said))
    assert before == pytest.approx((good + bad) / 2)
    for _ in range(40):
        blend.learn(said, int(random.choice(3, p=good / good.sum())))
    assert np.exp(blend.combine(said)) == pytest.approx(good, abs=0.08)
    alone = np.stack([said[0], np.full(3, np.nan, np.float32)])
    assert np.exp(blend.combine(alone)) == pytest.approx(bad), "a single source is taken as is"
    unsure = np.log(np.array([[0.9], [0.2]], np.float32))
    for _ in range(40):
        blend.learn(unsure, None)
    assert np.exp(blend.combine(unsure))[0] < 0.3, "no token was picked, as the second source predicted"
    said = np.log(np.array([[0.9, 0.09], [0.09, 0.9]], np.float32))
    assert np.exp(MixtureWeights(2, lookups_from=0).combine(said)).sum() <= 1.0, (
        "probabilities sum to at most one"
    )


def test_chain_of_a_lookup_is_scored_by_the_drafter_in_one_step() -> None:
    table = random_table(4, 1.0, WORDS)
    drafter, lookup = TableDrafter(table), ChainLookup([3, 1, 4, 1, 5], 0.99)
    mixture = Mixture([Source("table", drafter, greedy_scorer(WORDS))], [lookup])
    growth = grow(mixture, [0, 2], GrowthPolicy(40, 8, min_gain=0.0), max_depth=12)
    growth.tree.check()
    chain = [growth.every.path_tokens(node) for node in drafter.steps[0]]
    assert chain == [[], [3], [3, 1], [3, 1, 4], [3, 1, 4, 1], [3, 1, 4, 1, 5]]
    assert lookup.asked[0] == []
    assert set(growth.tree.source.tolist()) == {0, 1}


def test_single_lookup_proposes_and_learns() -> None:
    lookup = ChainLookup([3, 1, 4], 0.9)
    mixture = Mixture([], [lookup])
    growth = grow(mixture, [0, 2], GrowthPolicy(40, 8), max_depth=2)
    assert growth.tree.token.tolist() == [2, 3, 1] and growth.tree.depth.tolist() == [0, 1, 2]
    growth.learn(mixture, [0, 1], [3, 7])
    assert lookup.taught == [[3, 7]]
    assert mixture.main is None


def test_all_sources_of_accepted_nodes_are_credited() -> None:
    """Both sources proposed two of five accepted nodes; then the first proposed one, the second the rest."""
    guessed = np.array([[True, True, True, False, False], [True, True, False, True, True]])
    standing = SourceStats.of(1, 1)
    mixture = Mixture(
        [Source("a", TableDrafter(random_table(1, 1.0, WORDS)), greedy_scorer(WORDS))],
        [ChainLookup([1], 0.5)],
    )
    mixture.stats = standing
    asked = GrowthStats((0, 1), {0: 0.2, 1: 0.001})
    mixture.end_pass(asked, guessed, 6, 9.0, link=0.5)
    assert standing.seconds == 0.0, "the first pass, which includes the prompt, is not counted"
    mixture.end_pass(asked, guessed, 6, 1.0, link=0.5)
    assert standing.seconds == 1.0 and standing.tokens == 6.0
    assert [worth.gain for worth in standing.backoffs] == [3.0, 2.0]
    assert [worth.seconds for worth in standing.backoffs] == [0.2, 0.001]


def test_slow_source_is_paused_and_retried() -> None:
    worth = Backoff()
    for _ in range(20):
        worth.observe(seconds=0.5, gain=0.1)
    assert worth.should_pause(tokens=3.0, seconds=1.0, link=0.0), "a third of a token for half of the time"
    assert not worth.should_pause(tokens=3.0, seconds=1.0, link=1.0), "time that passes anyway"
    assert not worth.should_pause(tokens=3.0, seconds=100.0, link=0.0), "next to nothing"
    worth.pause()
    rested = 0
    while worth.paused:
        worth.skip_pass()
        rested += 1
    assert rested == 16 and not worth.should_pause(3.0, 1.0, 0.0), "not enough observations yet"
    worth.observe(seconds=60.0, gain=0.0)
    assert worth.seconds == 0.0, "catching up does not count as its cost"
    for _ in range(4):
        worth.observe(seconds=0.5, gain=0.0)
    assert worth.should_pause(tokens=3.0, seconds=1.0, link=0.0)
    worth.pause()
    assert worth.paused_passes == 32, "longer each time"
    for _ in range(60):
        worth.observe(seconds=0.5, gain=2.0)
    assert not worth.should_pause(tokens=3.0, seconds=1.0, link=0.0), "it pays again"
    worth.pause()
    assert worth.paused_passes == 16, "a short time again"
    for _ in range(9):
        worth.pause()
    assert worth.paused_passes == 128, "pauses are bounded"


class SilentDrafter(TableDrafter):
    """A drafter without predictions: no children of any node, or with `row`, empty rows."""

    row = False

    def expand(self, candidates: GrowingTree, nodes: Sequence[int], scorer: Scorer) -> Children:
        known = super().expand(candidates, nodes, scorer)
        if self.row:
            return Children(known.token, np.full_like(known.log_prob, -np.inf), known.x)
        return Children(known.token[:, :0], known.log_prob[:, :0], known.x[:, :0])


@pytest.mark.parametrize("row", [False, True])
def test_missing_predictions_are_ignored(row: bool) -> None:
    drafter, lookup = SilentDrafter(random_table(4, 1.0, WORDS)), ChainLookup([3, 1, 4, 1, 5], 0.9)
    drafter.row = row
    mixture = Mixture([Source("silent", drafter, greedy_scorer(WORDS))], [lookup])
    growth = grow(mixture, [0, 2], GrowthPolicy(40, 8, min_gain=0.0), max_depth=12)
    assert growth.tree.score == pytest.approx(np.log(0.9) * np.arange(6), abs=1e-5)
    assert len(drafter.steps) == 1, "a source without predictions is not called again"
    growth.learn(mixture, [0, 1], [3, 7])
    assert np.exp(mixture.weights.combine(np.array([[np.nan], [np.log(0.9)]], np.float32))) == pytest.approx(
        0.9
    )


class ShallowDrafter(SilentDrafter):
    """A drafter that predicts only the children of the root."""

    def expand(self, candidates: GrowingTree, nodes: Sequence[int], scorer: Scorer) -> Children:
        if ROOT in nodes:
            return TableDrafter.expand(self, candidates, nodes, scorer)
        return super().expand(candidates, nodes, scorer)


def test_source_may_expand_only_some_nodes() -> None:
    drafter = ShallowDrafter(random_table(4, 1.0, WORDS))
    grow(
        Mixture.single(drafter, greedy_scorer(WORDS)), [0, 2], GrowthPolicy(12, 2, min_gain=0.0), max_depth=5
    )
    assert len(drafter.steps) > 2


def test_nodes_are_credited_to_sources_likely_enough_for_the_tree() -> None:
    """The lookup is certain of a token that the drafter ranks last: the lookup gets the credit."""
    table = torch.full((WORDS, WORDS), 0.0)
    table[:, 3] = -9.0
    mixture = Mixture([Source("t", TableDrafter(table), greedy_scorer(WORDS))], [ChainLookup([3], 0.95)])
    growth = grow(mixture, [0, 2], GrowthPolicy(2, 4, min_gain=0.0), max_depth=2)
    assert growth.tree.token.tolist() == [2, 3]
    for _ in range(2):
        growth.end_pass(mixture, [0, 1], 2, 1.0, link=0.0)
    assert [worth.gain for worth in mixture.stats.backoffs] == [0.0, 1.0]


def test_paused_sources_are_not_called() -> None:
    drafter, lookup = TableDrafter(random_table(4, 1.0, WORDS)), ChainLookup([3, 1], 0.9)
    mixture = Mixture([Source("table", drafter, greedy_scorer(WORDS))], [lookup])
    mixture.stats.backoffs[0].pause()
    growth = grow(mixture, [0, 2], GrowthPolicy(40, 8), max_depth=5)
    assert mixture.active() == (1,) and drafter.steps == []
    assert growth.tree.token.tolist() == [2, 3, 1]
    alone = Mixture.single(drafter, greedy_scorer(WORDS))
    alone.stats.backoffs[0].pause()
    assert alone.active() == (0,), "a single source is never paused"
