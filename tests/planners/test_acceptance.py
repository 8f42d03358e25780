"""Learned corrections of a draft's scores, and their storage."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from offspec.draft.grow.best_first import grow
from offspec.draft.grow.tree_grower import GrowthPolicy
from offspec.draft.mix.mixture import Mixture
from offspec_planners.acceptance import (
    DEPTHS,
    FOREST,
    RANKS,
    Calibration,
    DepthRankTable,
    TemperatureFit,
    typical,
)
from offspec_planners.tree_growth import replay
from offspec_planners.typical_acceptance import MODEL, SELF_DRAFT, TypicalDraft, expected_tokens
from tests.support.table_drafter import TableDrafter, greedy_scorer, random_table

WORDS = 12


def _contexts(random: np.random.Generator, count: int, children: int = RANKS) -> NDArray[np.float32]:
    """Log-probabilities [count, K] of the most likely of 40 tokens, descending."""
    x = -np.sort(-random.normal(0, 2, (count, 40)), axis=1)
    x -= np.log(np.exp(x).sum(axis=1, keepdims=True))
    return np.asarray(x[:, :children], np.float32)


def _trained(seed: int, observations: int = 200) -> Calibration:
    """A calibration with observations at many depths."""
    random = np.random.default_rng(seed)
    calibration = Calibration()
    for count in range(observations):
        log_probs = _contexts(random, 1)[0]
        rank = int(random.integers(RANKS + 1))
        calibration.observe(count % 20, log_probs, log_probs, None if rank == RANKS else rank)
        if count % 5 == 4:
            calibration.end_pass(random.uniform(1, 9), int(random.integers(1, 9)))
    return calibration


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 1000), st.integers(1, RANKS), st.integers(0, 30))
def test_corrected_values_are_probabilities(seed: int, children: int, depth: int) -> None:
    table, random = _trained(seed).table, np.random.default_rng(seed)
    log_probs = _contexts(random, 6, children)
    assert np.array_equal(DepthRankTable().apply(log_probs, [depth]), log_probs), (
        "an empty table changes nothing"
    )
    corrected = table.apply(log_probs, [depth])
    assert corrected.dtype == np.float32 and (corrected <= 0).all()
    assert (np.exp(corrected).sum(axis=1) <= 1 + 1e-5).all()
    assert np.array_equal(table.apply(log_probs, [depth] * 6), corrected)
    # The differences from the temperature's estimate: a factor for each rank, and one common divisor.
    moved = corrected - log_probs - table.log_factors[min(depth, DEPTHS - 1), :children]
    assert np.allclose(moved, moved[:, :1], atol=1e-4)
    assert np.abs(table.log_factors).max() <= np.log(5) + 1e-6


def test_table_corrects_errors_that_the_temperature_cannot() -> None:
    """A target that takes second choices too often, increasingly so far from the root."""
    random = np.random.default_rng(1)
    table = DepthRankTable()

    def truth(log_probs: NDArray[np.float32], depth: int) -> NDArray[np.float64]:
        p = np.exp(log_probs.astype(np.float64))
        p[1] *= 1.5 if depth < 4 else 3.0
        rest = max(1 - float(np.exp(log_probs, dtype=np.float64).sum()), 0.0)
        every = np.append(p, rest)
        return np.asarray(every / every.sum())

    for count in range(3000):
        depth, raw = count % 8, _contexts(random, 1)[0]
        corrected = table.apply(raw[None], [depth])[0]
        rank = int(random.choice(RANKS + 1, p=truth(raw, depth)))
        table.observe(depth, corrected, None if rank == RANKS else rank)
        if count % 8 == 7:
            table.end_pass()
    for depth in (1, 6):
        raw = _contexts(random, 300)
        wanted = np.mean([truth(row, depth)[1] for row in raw])
        found = np.exp(table.apply(raw, [depth]))[:, 1].mean()
        assert found == pytest.approx(wanted, rel=0.15)
        assert abs(found - wanted) < 0.5 * abs(np.exp(raw[:, 1]).mean() - wanted)


def test_nan_is_ignored() -> None:
    calibration = Calibration()
    broken = np.full(RANKS, np.nan, np.float32)
    calibration.observe(0, broken, broken, 3)
    calibration.end_pass(2.0, 2)
    assert calibration.fit.observations == 0 and not calibration.table.log_factors.any()


def test_acceptance_is_counted_or_estimated() -> None:
    table = DepthRankTable()
    assert table.acceptance().shape == (DEPTHS, RANKS)
    assert (np.diff(table.acceptance()[0]) <= 0).all()
    log_probs = _contexts(np.random.default_rng(0), 1)[0]
    for count in range(1000):
        table.observe(2, log_probs, (0, 0, 0, 1, None)[count % 5])
    accepted = table.acceptance()
    assert accepted[2, :3] == pytest.approx([0.6, 0.2, 0.0], abs=0.01)
    assert accepted[9, 0] == pytest.approx(0.6, abs=0.05), "where nothing was seen, as at all depths"
    assert (accepted >= 0).all() and (accepted.sum(axis=1) <= 1 + 1e-9).all()


def test_passes_correct_the_expected_tokens() -> None:
    calibration = Calibration()
    assert calibration.correction == 1.0
    for _ in range(400):
        calibration.end_pass(10.0, 8)
    assert calibration.correction == pytest.approx(0.8, abs=0.01) and calibration.passes == 400
    for _ in range(2000):
        calibration.end_pass(1.0, 30)
    assert calibration.correction == 2.0


def test_walk_updates_ranks_and_counts_as_a_pass() -> None:
    """A child missing in the tree still has its rank; the end of the text is not a miss."""
    calibration = Calibration()
    scorer = greedy_scorer(WORDS, calibration)
    mixture = Mixture.single(TableDrafter(random_table(3, size=WORDS)), scorer)
    growth = grow(mixture, [2], GrowthPolicy(20, 4, 0.0), max_depth=9)
    tree = growth.tree
    first = next(node for node in range(1, len(tree)) if growth.candidates[node] in growth.children)
    assert tree.depth[first] == 1
    outside = next(token for token in range(WORDS) if token not in tree.children(first))
    growth.learn(mixture, [0, first], [int(tree.token[first]), outside])
    assert calibration.table.visits[:3].tolist() == pytest.approx([0.995, 0.995, 0])
    assert calibration.table.hits[:2].sum() == pytest.approx(2 * 0.995)
    assert calibration.expected == pytest.approx(tree.expected_tokens) and calibration.observed == 2
    inside = next(iter(tree.children(first)))
    growth.learn(mixture, [0, first], [int(tree.token[first]), inside])
    promised = float(np.exp(tree.score[tree.depth < 2]).sum())
    assert calibration.expected == pytest.approx(0.995 * tree.expected_tokens + promised)


def test_json_round_trip() -> None:
    calibration = _trained(4)
    for tree in typical(MODEL).forest[:3] * 20:
        calibration.remember(tree)
    assert len(calibration.forest) == FOREST
    again = Calibration.from_json(json.loads(json.dumps(calibration.to_json())))
    assert again.fit.tau == pytest.approx(calibration.fit.tau, abs=1e-5)
    assert again.fit.observations == 200 and again.passes == 40
    assert again.correction == pytest.approx(calibration.correction)
    np.testing.assert_allclose(again.table.log_factors, calibration.table.log_factors, atol=1e-3)
    np.testing.assert_allclose(again.acceptance(), calibration.acceptance(), atol=1e-3)
    for kept, made in zip(again.forest, calibration.forest, strict=True):
        wanted = replay((made,), 300, 8, None).expected
        assert replay((kept,), 300, 8, None).expected == pytest.approx(wanted, rel=1e-3)


def test_damaged_files_are_refused() -> None:
    damage: tuple[tuple[str, Any], ...] = (
        ("offspec_calibration", 7),
        ("tau", 0.0),
        ("tau", 80.0),
        ("tau", "warm"),
        ("observations", 1.5),
        ("table.visits", [1.0] * 3),
        ("table.visits", [-1.0] * DEPTHS),
        ("table.hits", [[1.0] * RANKS] * (DEPTHS - 1) + [[1.0]]),
        ("table.hits", [[1.0] * RANKS] * DEPTHS),
        ("table.expected", [[float("nan")] * RANKS] * DEPTHS),
        ("expected", -1.0),
        ("observed", None),
        ("passes", -3),
        ("forest", 5),
    )
    for key, value in damage:
        found: dict[str, Any] = Calibration().to_json()
        inner, _, name = key.rpartition(".")
        (found[inner] if inner else found)[name] = value
        with pytest.raises(ValueError, match=f"^{key.split('.')[0]}.* should be") as caught:
            Calibration.from_json(found)
        assert "\n" not in str(caught.value)
    good = Calibration().to_json()
    for key in good:
        with pytest.raises(ValueError, match=f"{key} is missing"):
            Calibration.from_json({name: value for name, value in good.items() if name != key})
    with pytest.raises(ValueError, match="mood"):
        Calibration.from_json({**good, "mood": "fine"})
    with pytest.raises(ValueError, match="object"):
        Calibration.from_json([1, 2])


@pytest.mark.parametrize(("kind", "nodes", "wanted"), [(SELF_DRAFT, 256, 11.0), (MODEL, 768, 11.7)])
def test_typical_forests_have_the_stated_acceptance(kind: TypicalDraft, nodes: int, wanted: float) -> None:
    calibration = typical(kind)
    assert len(calibration.forest) == 16 and all(len(tree.parent) == 2048 for tree in calibration.forest)
    assert expected_tokens(calibration.forest, nodes) == pytest.approx(wanted, rel=0.03)
    grown = [replay((tree,), nodes, 16, None).expected for tree in calibration.forest]
    assert sum(grown) / len(grown) == pytest.approx(wanted, rel=0.1)
    again = typical(kind)
    for one, other in zip(calibration.forest, again.forest, strict=True):
        assert np.array_equal(one.score, other.score)
    again.end_pass(5.0, 5)  # learning through one caller does not affect another
    accepted = calibration.acceptance()
    assert np.array_equal(typical(kind).acceptance(), accepted)
    assert (np.diff(accepted, axis=1) <= 0).all() and 0.5 < accepted[3, 0] < 0.95
    assert calibration.fit.tau == TemperatureFit().tau
