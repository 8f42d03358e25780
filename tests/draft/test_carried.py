"""Trees carried below the next root equal newly drafted ones."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from offspec.core.config import SamplingParams
from offspec.draft.base import Scorer
from offspec.draft.grow.best_first import grow_forest
from offspec.draft.grow.tree_grower import GrowthPolicy, TreeGrower
from offspec.draft.growing_tree import GrowingTree
from offspec.draft.lm import LMDrafter
from offspec.draft.mix.sources import Sources
from offspec.model.cache import TreeCache
from offspec.model.loaded import LoadedModel
from offspec.sampling.logits_processor import LogitsProcessor
from offspec.sampling.noise import GumbelNoise
from offspec.sampling.token_tree import ROOT
from offspec_planners.acceptance import Calibration
from tests.support.tiny_models import VOCABULARY, load_all, open_model, write_model

TEXT = [5, 9, 17, 33, 64, 20]
POLICY = GrowthPolicy(budget=16, width=3, min_gain=0.0, ahead=True)


def _scorer(temperature: float) -> Scorer:
    noise = GumbelNoise(3, VOCABULARY) if temperature else None
    processor = LogitsProcessor(SamplingParams(temperature=temperature), VOCABULARY, [])
    return Scorer(processor, noise, Calibration())


def _drafted_ahead(growing: TreeGrower, steps: int) -> GrowingTree:
    """Return its candidates, after `steps` steps during a pass."""
    grow_forest([growing])
    taken = count()
    growing.draft_ahead(lambda: next(taken) < steps)
    return growing._candidates


@pytest.fixture
def model(tmp_path: Path) -> Iterator[LoadedModel]:
    model = open_model(write_model(tmp_path, spread=0.4))
    load_all(model, 32)
    yield model
    model.close()


def _drafter(model: LoadedModel) -> LMDrafter:
    lean = model.fused_model(32)
    assert lean is not None
    lean.cache.reserve(256)
    return LMDrafter("draft", lean, model.device, model.close)


@torch.no_grad()
@pytest.mark.parametrize(("temperature", "pick"), [(0.0, 0), (0.9, -1)])
def test_rows_and_tokens_below_the_next_root(model: LoadedModel, temperature: float, pick: int) -> None:
    drafter = _drafter(model)
    anew, scorer = drafter.fork(TreeCache(0, 0)), _scorer(temperature)
    mixture = Sources({"draft": drafter}).mixture(["draft"], lambda name: scorer)
    growing = TreeGrower(mixture, TEXT, POLICY, 9)
    candidates, seen = _drafted_ahead(growing, 4), growing.growth_stats.predictions[0]
    assert len(seen) > 4 * 3, "it went on below the tree"
    inner = [
        node for node in sorted(seen) if {*candidates.children(node).tolist()} & {*seen} and node != ROOT
    ]
    root = inner[pick]
    path = [int(candidates.parent[root])]
    while path[0] != ROOT:
        path.insert(0, int(candidates.parent[path[0]]))
    text = [*TEXT, *candidates.path_tokens(root)]

    carried = growing.carried(path[-1], int(candidates.token[root]))
    assert carried is not None and len(carried.predictions) > 1
    mixture.sources[0].drafter.commit_and_keep(path, carried.places)  # type: ignore[attr-defined]
    again = TreeGrower(mixture, text, POLICY, 5, carried=carried)
    tree = again._candidates
    for node, place in zip(np.flatnonzero(_inside(candidates, root)), range(tree.count), strict=True):
        assert tree.path_tokens(place) == candidates.path_tokens(int(node))[len(text) - len(TEXT) :]
        assert tree.score[place] == pytest.approx(candidates.score[node] - candidates.score[root])

    anew.start(text)
    for place in sorted(carried.predictions):
        fresh, (kept, row) = anew.expand(tree, [place], scorer), carried.predictions[place]
        assert fresh.token[0].tolist() == kept.token[row].tolist()
        np.testing.assert_allclose(fresh.log_prob[0], kept.log_prob[row], atol=1e-4)
    nodes = again._likeliest(3)
    assert nodes and not {*nodes} & {*carried.predictions}
    further, fresh = (one.expand(tree, nodes, scorer) for one in (drafter, anew))
    assert further.token.tolist() == fresh.token.tolist()
    np.testing.assert_allclose(further.log_prob, fresh.log_prob, atol=1e-4)


def _inside(tree: GrowingTree, root: int) -> list[bool]:
    """Return for every node whether it is the root or below it, computed one by one."""
    inside = [False] * tree.count
    for node in range(tree.count):
        inside[node] = node == root or (node != ROOT and inside[int(tree.parent[node])])
    return inside


def test_unexpanded_root_carries_nothing(model: LoadedModel) -> None:
    mixture = Sources({"draft": _drafter(model)}).mixture(["draft"], lambda name: _scorer(0.0))
    growing = TreeGrower(mixture, TEXT, POLICY, 9)
    candidates = _drafted_ahead(growing, 1)
    token = next(
        token for token in range(VOCABULARY) if token not in candidates.token[candidates.children(ROOT)]
    )
    leaf = next(
        node for node in candidates.children(ROOT).tolist() if node not in growing.growth_stats.predictions[0]
    )
    assert growing.carried(ROOT, token) is None
    assert growing.carried(ROOT, int(candidates.token[leaf])) is None
    off = TreeGrower(mixture, TEXT, replace(POLICY, ahead=False), 9)
    assert not off.can_draft_ahead


def test_subtrees_omit_a_second_source() -> None:
    tree = GrowingTree(7, sources=2)
    tree.extend(np.array([0]), np.array([[3, 4]]), np.log([[0.6, 0.3]]))
    tree.extend(np.array([1]), np.array([[5, 6]]), np.log([[0.5, 0.4]]))
    tree.extend(np.array([2]), np.array([[8]]), np.log([[0.5]]), source=1)
    tree.extend(np.array([3]), np.array([[9]]), np.log([[0.2]]), source=1)
    tree.expanded_by[:, [0, 1, 3]] = True
    kept, nodes = tree.subtree(1)
    assert nodes.tolist() == [1, 3, 4] and kept.token[:3].tolist() == [3, 5, 6]
    assert kept.parent[:3].tolist() == [-1, 0, 0] and kept.depth[:3].tolist() == [0, 1, 1]
    np.testing.assert_allclose(np.exp(kept.score[:3]), [1.0, 0.5, 0.4], rtol=1e-6)
    assert kept.expanded_by[0, :3].tolist() == [True, True, False] and not kept.expanded_by[1].any()
    assert np.isnan(kept.source_log_probs[1, :3]).all()
    kept.extend(np.array([2]), np.array([[1]]), np.log([[0.5]]))
    assert kept.score[3] == pytest.approx(np.log(0.2)) and kept.depth[3] == 2
