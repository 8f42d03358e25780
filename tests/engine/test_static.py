"""Static trees at run time: each node has the draft token of its rank, and output never changes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from offspec import PassStats
from offspec.core.config import SamplingParams
from offspec.draft.base import Children, Scorer
from offspec.draft.grow.static import grow_static
from offspec.draft.mix.mixture import Mixture
from offspec.sampling.logits_processor import LogitsProcessor
from offspec_planners.acceptance import Calibration
from offspec_planners.sequoia import best_tree_shape
from tests.support import heads_files
from tests.support.answers import PROMPT, TargetAndDrafts, generate_tokens, sampling
from tests.support.exhaustive import sampled_params
from tests.support.plan_fixtures import PlanEnvironment
from tests.support.table_drafter import VOCABULARY as WORDS
from tests.support.table_drafter import TableDrafter
from tests.support.tiny_models import tiny_engine

SHAPES = {
    "falling": best_tree_shape(np.tile(0.6 * 0.5 ** np.arange(12), (8, 1)), 64, 8),
    "rising": best_tree_shape([[0.3, 0.1, 0.2], [0.2, 0.4, 0.1], [0.5, 0.0, 0.3]], 40, 6),
    "chain": best_tree_shape([[0.8]], 9, 8),
    "more ranks than a draft offers": best_tree_shape(np.full((2, 60), 0.9), 70, 2),
    "root alone": best_tree_shape([[0.5]], 1, 4),
}


@pytest.mark.usefixtures("drafters_stay")
@pytest.mark.parametrize(("draft", "width"), sampled_params([("near", 5), ("hostile", 64)], ("hostile", 64)))
def test_a_static_tree_changes_nothing(trio: TargetAndDrafts, draft: str, width: int) -> None:
    rules = {"repetition_penalty": 1.1, "top_p": 0.98}
    params = [sampling(temperature, 24, **rules) for temperature in (0.0, 1.0)]
    expected = generate_tokens(trio.target, *params)
    with tiny_engine(trio.target, getattr(trio, draft), budget=128, width=width) as engine:
        for turn, shape in enumerate(SHAPES.values()):
            engine.set_draft_policy(replace(engine.drafting.policy, shape=shape))
            result = engine.generate(PROMPT, params[turn % 2])
            assert result.token_ids == expected[turn % 2]
            assert draft == "hostile" or not shape.depth or result.passes < 0.7 * 24, "it is accepted in part"


def _scorer(children: int = 32) -> Scorer:
    return Scorer(LogitsProcessor(SamplingParams(), WORDS, []), None, Calibration(), children)


def _table() -> torch.Tensor:
    return torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("width", [1, 3, 50])
def test_every_place_holds_the_guess_of_its_rank(width: int) -> None:
    drafter = TableDrafter(_table())
    shape = best_tree_shape([[0.3, 0.2, 0.4], [0.5, 0.2, 0.1]], 40, 5)
    growth = grow_static(Mixture.single(drafter, _scorer()), [1, 2], shape, 20, width)
    growth.tree.check()
    assert growth.tree.parent.tolist() == shape.parent.tolist()
    ranked = drafter.table.argsort(dim=1, descending=True)
    for node in range(1, len(shape)):
        above = growth.tree.token[shape.parent[node]]
        assert growth.tree.token[node] == ranked[above, shape.rank[node]]
    assert growth.steps == len(drafter.steps) == len(shape.steps(width))
    assert set(growth.children) == set(shape.parent[1:].tolist())


@pytest.mark.parametrize("max_depth", [0, 1, 3])
def test_no_node_is_deeper_than_there_is_room(max_depth: int) -> None:
    shape = best_tree_shape([[0.6, 0.3]], 60, 8)
    growth = grow_static(Mixture.single(TableDrafter(_table()), _scorer()), [2], shape, max_depth, 4)
    assert growth.tree.depth.max() == max_depth
    assert len(growth.tree) == (shape.levels() <= max_depth).sum()


def test_missing_draft_tokens_are_left_out() -> None:
    """Two children a node, and of one word never more than one."""
    table = _table()
    only = int(table[2].argmax())
    table[only] = -torch.inf
    table[only, 0] = 0.0
    shape = best_tree_shape(np.full((2, 4), 0.2), 21, 2)
    assert len(shape) == 21
    growth = grow_static(Mixture.single(TableDrafter(table), _scorer(children=2)), [2], shape, 9, 8)
    growth.tree.check()
    assert np.bincount(growth.tree.parent[1:]).tolist() == [2, 1, 2]


class Silent(TableDrafter):
    """Proposes no token for any node."""

    def expand(self, candidates: object, nodes: Sequence[int], scorer: Scorer) -> Children:
        none = np.empty((len(nodes), 0), np.float32)
        return Children(none.astype(np.int64), none, none)


def test_from_silence_there_is_nothing_to_learn() -> None:
    scorer = _scorer()
    mixture = Mixture.single(Silent(_table()), scorer)
    growth = grow_static(mixture, [1, 2], best_tree_shape([[0.6, 0.3]], 9, 3), 20, 4)
    assert len(growth.tree) == 1 and growth.children == {}
    growth.learn(mixture, [0], [3])
    assert scorer.calibration.fit.observations == 0 and scorer.calibration.table.hits.sum() == 0


@pytest.mark.usefixtures("drafters_stay")
@pytest.mark.parametrize("verify", ["coupled", "sequoia"])
def test_a_head_fills_a_shape_once_it_has_seen_the_target_at_work(
    plan_env: PlanEnvironment, tmp_path: Path, verify: str
) -> None:
    """Proposes no token in its first pass."""
    head = heads_files.write_head(tmp_path / "head", None, heads_files.medusa_tensors())
    with plan_env.load(draft=str(head), tree="sequoia", verify=verify, temperature=1.0) as engine:
        shape = engine.drafting.policy.shape
        assert shape is not None and len(shape) > 4
        for temperature in (1.0, 0.0):
            params = sampling(temperature, 12)
            alone = engine.generate(PROMPT, params, speculate=False)
            events = list(engine.stream([*PROMPT, 5 + int(temperature)], params))
            first, *others = [event.tree_nodes for event in events if isinstance(event, PassStats)]
            assert first == 1 and max(others) > 4
            if verify == "coupled" or params.greedy:
                assert engine.generate(PROMPT, params).token_ids == alone.token_ids
