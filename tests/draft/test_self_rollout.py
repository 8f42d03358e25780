"""Self-rollout: trees along a text that the draft continues, without leftovers."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from offspec import SamplingParams
from offspec.draft.base import Scorer
from offspec.draft.grow.self_rollout import self_rollout
from offspec.draft.grow.tree_grower import GrowthPolicy
from offspec.draft.lm import LMDrafter
from offspec.draft.mix.mixture import Mixture
from offspec.model.loaded import LoadedModel
from offspec.sampling.logits_processor import LogitsProcessor
from offspec.sampling.noise import GumbelNoise
from offspec_planners.acceptance import Calibration
from offspec_planners.tree_growth import RecordedTree
from tests.support.table_drafter import VOCABULARY as WORDS
from tests.support.table_drafter import TableDrafter
from tests.support.tiny_models import VOCABULARY, load_all, open_model, reference, tiny_engine, write_model

PROMPT = [5, 9, 17, 33, 64, 20, 21, 22, 9]
STRIDE = 4
POLICY = GrowthPolicy(16, 4, record=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "draft")


@pytest.fixture(scope="module")
def drafter(folder: Path) -> Iterator[LMDrafter]:
    model: LoadedModel = open_model(folder)
    load_all(model, 256)
    lean = model.fused_model(256)
    assert lean is not None
    yield LMDrafter("draft", lean, model.device, model.close)
    model.close()


def _scorer(temperature: float = 0.0) -> Scorer:
    processor = LogitsProcessor(SamplingParams(temperature=temperature), VOCABULARY, PROMPT)
    noise = GumbelNoise(11, VOCABULARY, torch.device("cpu")) if temperature else None
    return Scorer(processor, noise, Calibration())


def _preview(drafter: LMDrafter, trees: int = 4, temperature: float = 0.0) -> list[RecordedTree]:
    mixture = Mixture.single(drafter, _scorer(temperature))
    return self_rollout(mixture, PROMPT, POLICY, STRIDE, trees, room=256)


def same(found: Sequence[RecordedTree], expected: Sequence[RecordedTree]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one.parent, other.parent) and np.array_equal(one.score, other.score)


class _RecordingDrafter:
    """A drafter that records the text below which each tree was grown."""

    def __init__(self, inner: LMDrafter) -> None:
        self.inner, self.texts = inner, list[list[int]]()

    def start(self, ids: list[int]) -> None:
        self.texts.append(list(ids))
        self.inner.start(ids)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


def test_text_is_the_drafts_own_output(drafter: LMDrafter, folder: Path) -> None:
    listening = _RecordingDrafter(drafter)
    found = _preview(listening)
    answer = reference(folder, PROMPT, 60)
    assert len(found) == 4 and len(listening.texts) == 5
    assert listening.texts[0] == PROMPT
    for text, longer in zip(listening.texts, listening.texts[1:], strict=False):
        assert 0 < len(longer) - len(text) <= STRIDE
    said = listening.texts[-1][len(PROMPT) :]
    assert said == answer[: len(said)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_are_complete_and_reproducible(drafter: LMDrafter, temperature: float) -> None:
    found = _preview(drafter, temperature=temperature)
    assert [len(tree.parent) for tree in found] == [32] * 4
    for tree in found:
        assert tree.parent[0] == -1 and (tree.parent[1:] < np.arange(1, 32)).all()
        assert (tree.score[1:] <= tree.score[tree.parent[1:]] + 1e-6).all(), (
            "no path becomes more likely than its start"
        )
    again = _preview(drafter, 2, temperature)
    same(again, found[:2])  # fewer trees are a prefix of more


def test_cache_is_empty_afterwards(drafter: LMDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
    _preview(drafter)
    assert drafter._model.cache.length == 0
    real, calls = LMDrafter.expand, iter(range(100))

    def failing(self: LMDrafter, *given: object) -> object:
        if next(calls) == 6:
            raise KeyboardInterrupt
        return real(self, *given)

    monkeypatch.setattr(LMDrafter, "expand_steps", failing)
    with pytest.raises(KeyboardInterrupt):
        _preview(drafter)
    assert drafter._model.cache.length == 0 and torch.is_grad_enabled()


def test_unfillable_tree_ends_the_rollout() -> None:
    """Each word has only one next word, so a tree of 32 nodes is out of reach."""
    table = torch.full((WORDS, WORDS), -torch.inf)
    table[torch.arange(WORDS), (torch.arange(WORDS) + 1) % WORDS] = 0.0
    scorer = Scorer(LogitsProcessor(SamplingParams(), WORDS, []), None, Calibration(), 2)
    policy = replace(POLICY, budget=500, record=1000)
    drafter = TableDrafter(table)
    assert self_rollout(Mixture.single(drafter, scorer), [1, 2], policy, STRIDE, 3, room=100) == []
    assert drafter.rewound == [0, 0] and sum(map(len, drafter.steps)) <= 98, (
        "no deeper than the context allows"
    )


def test_rollout_near_the_end_of_the_context_changes_no_answer(folder: Path) -> None:
    prompt = _long(61)
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=3, ignore_eos=True)
    with tiny_engine(folder, "none", budget=1, context=64) as alone:
        expected = alone.generate(prompt, params).token_ids
    with tiny_engine(folder, folder, budget=64, context=64, lean=False) as engine:
        assert engine.generate(prompt, params).token_ids == expected
        assert len(engine.preview(prompt, params, trees=9)) < 9, "there is not enough space"
        assert len(engine.preview(prompt[:9], params, trees=2)) == 2
        assert engine.generate(prompt, params).token_ids == expected


def test_position_table_is_not_exceeded(tmp_path: Path) -> None:
    """With a position table, nothing lies beyond the last position."""
    model = write_model(tmp_path / "model", "gpt2", max_position_embeddings=64, n_positions=64)
    params = SamplingParams(seed=2, max_tokens=9, ignore_eos=True)
    with tiny_engine(model, model, budget=64, context=64) as engine:
        for length in (1, 50, 60, 63):
            engine.preview(_long(length), params, trees=6)
            assert engine.generate(_long(length), params).tokens == min(64 - length, 9)


def _long(length: int) -> list[int]:
    return [3 + (7 * i * i + i) % 90 for i in range(length)]


def test_rollouts_of_an_engine(folder: Path) -> None:
    """Rollouts learn nothing and are reproducible: the draft's cache of another prompt is not used."""
    params = SamplingParams(seed=2, max_tokens=20, ignore_eos=True)
    with tiny_engine(folder, folder, budget=64) as engine:
        expected = engine.generate(PROMPT, params)
        known = engine.drafting.calibration(engine.sources[0], 0.0, True)
        passes = known.passes
        before = engine.preview(PROMPT, params, trees=2)
        assert len(before) == 2 and known.passes == passes, "nothing was tried, so nothing is learned"
        assert engine.generate(PROMPT, params).token_ids == expected.token_ids
    with tiny_engine(folder, folder, budget=64) as engine:
        before = engine.preview(PROMPT, params, trees=2)
        engine.generate(_long(30), replace(params, temperature=1.0))  # the rollout learns nothing
        same(engine.preview(PROMPT, params, trees=2), before)
    with tiny_engine(folder, "none", budget=1) as engine:
        assert engine.preview(PROMPT, params) == []
