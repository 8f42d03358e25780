"""Static trees at run time: every place holds the guess of its rank, and what is said never changes."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from offspec import PassStats
from offspec.core.config import SamplingParams
from offspec.draft.base import Children, Scorer
from offspec.draft.grow.best_first import GrowthPolicy
from offspec.draft.grow.static import grow_static
from offspec.draft.lm import LMDrafter
from offspec.draft.mix.mixture import Mixture
from offspec.draft.mix.sources import Sources
from offspec.engine.decode import DecodeState, Decoding
from offspec.engine.forest import Member, run_pass
from offspec.model.loaded import LoadedModel
from offspec.sampling.logits_processor import LogitsProcessor
from offspec.sampling.noise import GumbelNoise
from offspec_planners.acceptance import Calibration
from offspec_planners.sequoia import TreeShape, best_tree_shape
from tests.support import heads_files
from tests.support.plan_world import World
from tests.support.products import some
from tests.support.table_drafter import VOCABULARY as WORDS
from tests.support.table_drafter import TableDrafter
from tests.support.tiny_models import VOCABULARY, disturb, load_all, open_model, write_model

CAPACITY, TOKENS = 256, 24
PROMPT = [5, 9, 17, 33, 64, 20, 21, 22, 9]
SHAPES = {
    "falling": best_tree_shape(np.tile(0.6 * 0.5 ** np.arange(12), (8, 1)), 64, 8),
    "rising": best_tree_shape([[0.3, 0.1, 0.2], [0.2, 0.4, 0.1], [0.5, 0.0, 0.3]], 40, 6),
    "chain": best_tree_shape([[0.8]], 9, 8),
    "more ranks than a draft offers": best_tree_shape(np.full((2, 60), 0.9), 70, 2),
    "root alone": best_tree_shape([[0.5]], 1, 4),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LoadedModel, dict[str, LMDrafter]]]:
    """A target, and drafts: one that agrees with it in part, one that never does."""
    folder = tmp_path_factory.mktemp("models")
    target = open_model(write_model(folder / "target"))
    near = write_model(folder / "near")
    disturb(near)
    drafts = {
        "near": open_model(near),
        "hostile": open_model(write_model(folder / "hostile", "qwen2", seed=5)),
    }
    for model in (target, *drafts.values()):
        load_all(model, CAPACITY)
    yield target, {name: _drafter(name, model) for name, model in drafts.items()}
    for model in (target, *drafts.values()):
        model.close()


def _drafter(name: str, model: LoadedModel) -> LMDrafter:
    return LMDrafter(name, model.tree_model, model.device, model.close)


def _say(
    target: LoadedModel,
    drafter: LMDrafter | None,
    temperature: float,
    shape: TreeShape | None,
    width: int = 4,
) -> tuple[list[int], int]:
    """Tokens after the prompt, and how many passes they took."""
    params = SamplingParams(temperature=temperature, repetition_penalty=1.1, top_p=0.98)
    processor = LogitsProcessor(params, VOCABULARY, PROMPT)
    noise = GumbelNoise(11, VOCABULARY, torch.device("cpu")) if processor.uses_noise else None
    decoding = Decoding(
        processor=processor,
        noise=noise,
        mixture=None if drafter is None else Mixture.single(drafter, Scorer(processor, noise, Calibration())),
        growth=GrowthPolicy(budget=128, width=width),
        stop=lambda token: False,
        shape=shape,
    )
    session = DecodeState(target, None if drafter is None else Sources({drafter.name: drafter}))
    session.begin(PROMPT)
    passes = 0
    while (left := TOKENS + len(PROMPT) - len(session.ids)) > 0:
        run_pass(target, [Member(session, decoding, left - 1)], most=1)
        passes += 1
    return session.ids[len(PROMPT) :], passes


@pytest.mark.parametrize("temperature", some([0.0, 1.0], 1.0))
@pytest.mark.parametrize("name", some(SHAPES, "falling", "more ranks than a draft offers", "root alone"))
def test_a_static_tree_changes_nothing(
    models: tuple[LoadedModel, dict[str, LMDrafter]], name: str, temperature: float
) -> None:
    (target, drafters), shape = models, SHAPES[name]
    expected, alone = _say(target, None, temperature, None)
    assert alone == len(expected) == TOKENS
    widths = (5, 64) if temperature else (64, 5)
    for (draft, drafter), width in zip(drafters.items(), widths, strict=True):
        said, passes = _say(target, drafter, temperature, shape, width)
        assert said == expected
        if draft == "near" and shape.depth:
            assert passes < 0.7 * TOKENS, "a draft that agrees in part is believed in part"


def _scorer(children: int = 32) -> Scorer:
    return Scorer(LogitsProcessor(SamplingParams(), WORDS, []), None, Calibration(), children)


@pytest.mark.parametrize("width", [1, 3, 50])
def test_every_place_holds_the_guess_of_its_rank(width: int) -> None:
    table = torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(0))
    drafter = TableDrafter(table)
    shape = best_tree_shape([[0.3, 0.2, 0.4], [0.5, 0.2, 0.1]], 40, 5)
    growth = grow_static(Mixture.single(drafter, _scorer()), [1, 2], shape, 20, width)
    growth.tree.check()
    assert growth.tree.parent.tolist() == shape.parent.tolist()
    ranked = table.argsort(dim=1, descending=True)
    for node in range(1, len(shape)):
        above = growth.tree.token[shape.parent[node]]
        assert growth.tree.token[node] == ranked[above, shape.rank[node]]
    assert growth.steps == len(drafter.steps) == len(shape.steps(width))
    assert set(growth.children) == set(shape.parent[1:].tolist())


@pytest.mark.parametrize("max_depth", [0, 1, 3])
def test_no_node_is_deeper_than_there_is_room(max_depth: int) -> None:
    drafter = TableDrafter(torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(0)))
    shape = best_tree_shape([[0.6, 0.3]], 60, 8)
    growth = grow_static(Mixture.single(drafter, _scorer()), [2], shape, max_depth, 4)
    assert growth.tree.depth.max() == max_depth
    assert len(growth.tree) == (shape.levels() <= max_depth).sum()


def test_what_a_draft_does_not_offer_is_left_out() -> None:
    """Two children a node, and of one word never more than one."""
    table = torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(0))
    only = int(table[2].argmax())
    table[only] = -torch.inf
    table[only, 0] = 0.0
    shape = best_tree_shape(np.full((2, 4), 0.2), 21, 2)
    assert len(shape) == 21
    growth = grow_static(Mixture.single(TableDrafter(table), _scorer(children=2)), [2], shape, 9, 8)
    growth.tree.check()
    assert np.bincount(growth.tree.parent[1:]).tolist() == [2, 1, 2]


class Silent(TableDrafter):
    """It has nothing to say about any node."""

    def expand(self, candidates: object, nodes: Sequence[int], scorer: Scorer) -> Children:
        none = np.empty((len(nodes), 0), np.float32)
        return Children(none.astype(np.int64), none, none)


def test_from_silence_there_is_nothing_to_learn() -> None:
    calibration = Calibration()
    scorer = Scorer(LogitsProcessor(SamplingParams(), WORDS, []), None, calibration)
    mixture = Mixture.single(Silent(torch.zeros(WORDS, WORDS)), scorer)
    growth = grow_static(mixture, [1, 2], best_tree_shape([[0.6, 0.3]], 9, 3), 20, 4)
    assert len(growth.tree) == 1 and growth.children == {}
    growth.learn(mixture, [0], [3])
    assert calibration.fit.observations == 0 and calibration.table.hits.sum() == 0


@pytest.mark.parametrize("verify", ["coupled", "sequoia"])
def test_a_head_fills_a_shape_once_it_has_seen_the_target_at_work(
    world: World, tmp_path: Path, verify: str
) -> None:
    """On its first pass it says nothing."""
    head = heads_files.write_head(tmp_path / "head", None, heads_files.medusa_tensors())
    with world.load(draft=str(head), tree="sequoia", verify=verify, temperature=1.0) as engine:
        shape = engine.drafting.policy.shape
        assert shape is not None and len(shape) > 4
        for temperature in (1.0, 0.0):
            params = SamplingParams(temperature, seed=3, max_tokens=12, ignore_eos=True)
            alone = engine.generate(PROMPT, params, speculate=False)
            events = list(engine.stream([*PROMPT, 5 + int(temperature)], params))
            first, *others = [event.tree_nodes for event in events if isinstance(event, PassStats)]
            assert first == 1 and max(others) > 4
            if verify == "coupled" or params.greedy:
                assert engine.generate(PROMPT, params).token_ids == alone.token_ids
