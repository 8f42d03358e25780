"""Trees grown together equal those grown alone, and share forward passes of one model."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from offspec.core.config import SamplingParams
from offspec.draft import forward
from offspec.draft.base import Drafter, Scorer
from offspec.draft.cross_vocab.drafter import CrossVocabDrafter, Retokenizer
from offspec.draft.cross_vocab.vocab_map import VocabMap
from offspec.draft.grow import best_first, tree_grower
from offspec.draft.grow.best_first import grow, grow_forest
from offspec.draft.grow.result import GrownTree
from offspec.draft.grow.tree_grower import GrowthPolicy, TreeGrower
from offspec.draft.lm import LMDrafter
from offspec.draft.lookup.suffix import SuffixLookup
from offspec.draft.mix.mixture import Mixture
from offspec.draft.mix.sources import Sources
from offspec.model.cache import TreeCache
from offspec.model.fused import model as lean
from offspec.model.fused.model import FusedModel
from offspec.model.tokenizer import load_tokenizer
from offspec.sampling.logits_processor import LogitsProcessor
from offspec.sampling.noise import GumbelNoise
from offspec_planners.acceptance import Calibration
from offspec_planners.cost import PassCosts
from tests.support.table_drafter import TableDrafter
from tests.support.tiny_models import VOCABULARY, load_all, open_model, write_model

NO_TARGET = TreeCache(0, 0)
POLICY = GrowthPolicy(budget=30, width=5, min_gain=0.0)
TEXTS = [[5, 9, 17, 33, 64, 20], [8, 8, 30], [3 + i % 31 for i in range(70)], [41, 5, 9, 17, 33, 64, 20, 21]]
DEAR = PassCosts(compute=((1, 1.0), (101, 2.0)), step=((1, 0.02), (33, 0.1)), start=0.02)


CPU = torch.device("cpu")


def lm(folder: Path, *, is_lean: bool, device: torch.device = CPU) -> LMDrafter:
    model = open_model(write_model(folder, spread=0.4), device=device)
    load_all(model, 32)
    made = model.fused_model(32) if is_lean else model.tree_model
    assert made is not None
    return LMDrafter("draft", made, model.device, model.close)


def translated(folder: Path) -> Drafter:
    tokenizer = load_tokenizer(write_model(folder / "other"))
    vocab = VocabMap.between(tokenizer, tokenizer)
    drafter = lm(folder / "draft", is_lean=True)
    return CrossVocabDrafter(drafter, vocab, Retokenizer(vocab, tokenizer, tokenizer), CPU)


MAKES: dict[str, Callable[[Path], dict[str, Drafter]]] = {
    "lean": lambda folder: {"lean": lm(folder, is_lean=True)},
    "tree": lambda folder: {"tree": lm(folder, is_lean=False)},
    "another vocabulary": lambda folder: {"translated": translated(folder)},
    "two": lambda folder: {"a": lm(folder / "a", is_lean=True), "b": lm(folder / "b", is_lean=False)},
}


class Sequences:
    """Several texts, with a fork of the sources for each."""

    def __init__(
        self, drafters: dict[str, Drafter], temperature: float = 0.9, *, lookups: bool = False
    ) -> None:
        self.made = Sources(drafters, {"suffix": SuffixLookup()} if lookups else {})
        self.temperature, self.notices = temperature, list[str]()
        self.sources = [self.made.fork(NO_TARGET) for _ in TEXTS]
        self.device = CPU

    def mixture(self, index: int) -> Mixture:
        params = SamplingParams(temperature=self.temperature, seed=index)
        processor = LogitsProcessor(params, VOCABULARY, TEXTS[index], self.device)
        noise = GumbelNoise(index, VOCABULARY, self.device) if self.temperature else None
        sources = self.sources[index]
        return sources.mixture(
            sources.names,
            lambda name: Scorer(processor, noise, Calibration(), children=6),
            noise,
            notify=lambda text: self.notices.append(f"{index}: {text}"),
        )

    def growing(self, texts: Sequence[Sequence[int]], policy: GrowthPolicy = POLICY) -> list[TreeGrower]:
        return [TreeGrower(self.mixture(i), ids, policy, 9) for i, ids in enumerate(texts)]

    def alone(self, texts: Sequence[Sequence[int]]) -> list[GrownTree]:
        return [grow(self.mixture(i), ids, POLICY, 9) for i, ids in enumerate(texts)]

    def commit(self, grown: Sequence[GrownTree]) -> list[list[int]]:
        """Return the texts, each extended by a path of its tree, as if the target had accepted it."""
        texts = list[list[int]]()
        for index, (tree, ids) in enumerate(zip(grown, TEXTS, strict=True)):
            path, tokens = [0], list[int]()
            while below := tree.tree.children(path[-1]):
                path.append(min(below.values()))
                tokens.append(int(tree.tree.token[path[-1]]))
            for drafter in self.sources[index].drafters.values():
                drafter.commit(tree.candidates[path].tolist())
            texts.append([*ids, *tokens, 7 + index])
        return texts


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the rows of the fused models' forward passes."""
    counted, real = list[int](), FusedModel.layers_over

    def counting(self: FusedModel, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        counted.append(len(hidden))
        return real(self, hidden, *rest)

    monkeypatch.setattr(FusedModel, "layers_over", counting)
    return counted


def same(grown: Sequence[GrownTree], expected: Sequence[GrownTree]) -> None:
    for found, wanted in zip(grown, expected, strict=True):
        assert found.tree.token.tolist() == wanted.tree.token.tolist()
        assert found.tree.parent.tolist() == wanted.tree.parent.tolist()
        np.testing.assert_allclose(found.tree.score, wanted.tree.score, atol=1e-4)
        assert found.steps == wanted.steps


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "temperature"), [("lean", 0.0), ("tree", 0.9), ("another vocabulary", 0.9), ("two", 0.9)]
)
def test_batched_trees_equal_single_trees(
    kind: str, temperature: float, tmp_path: Path, rows: list[int]
) -> None:
    """The first pass reads the prompts, the second the committed tokens, both batched."""
    drafters = MAKES[kind](tmp_path)
    beside = Sequences(drafters, temperature, lookups=kind == "two")
    by_itself = Sequences(drafters, temperature, lookups=kind == "two")
    texts: list[list[int]] = TEXTS
    for _ in range(2):
        before = len(rows)
        found = grow_forest(beside.growing(texts))
        together, before = len(rows) - before, len(rows)
        alone = by_itself.alone(texts)
        assert len(found[0].tree) == 30
        same(found, alone)
        if kind == "lean":
            assert together == max(tree.steps for tree in alone) < len(rows) - before
        texts = beside.commit(found)
        assert by_itself.commit(alone) == texts
    beside.made.close()


@torch.no_grad()
def test_logits_of_several_trees_are_computed_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few rows at a time, but a single tree in any case; a failing part fails its trees."""
    monkeypatch.setattr(forward, "HEAD_ROWS", 7)
    drafters, counted, real = MAKES["lean"](tmp_path), list[int](), FusedModel.logits
    failing = False

    def counting(self: FusedModel, hidden: torch.Tensor) -> torch.Tensor:
        counted.append(len(hidden))
        if failing and len(counted) == 2:
            raise RuntimeError("no room")
        return real(self, hidden)

    monkeypatch.setattr(FusedModel, "logits", counting)
    found = grow_forest(Sequences(drafters).growing(TEXTS))
    assert max(counted) <= 7 and len(counted) > max(tree.steps for tree in found)
    same(found, Sequences(drafters).alone(TEXTS))
    assert forward.logit_groups([5, 2, 3, 9, 1]) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)]
    monkeypatch.setattr(forward, "HEAD_ROWS", 2)
    counted.clear()
    failing = True
    grown = grow_forest(Sequences(drafters).growing(TEXTS))
    assert [len(tree.tree) > 1 for tree in grown] == [True, True, False, False], "two roots at a time"


@torch.no_grad()
@pytest.mark.gpu
def test_cuda_graphs_of_several_caches_equal_the_cpu(tmp_path: Path) -> None:
    """Each tree's step is a separate graph over its own cache, captured and then replayed."""
    grown = list[list[GrownTree]]()
    for name in ("cpu", "cuda"):
        device = torch.device(name)
        drafter = lm(tmp_path, is_lean=True, device=device)
        sequences, texts = Sequences({"lean": drafter}, 0.9), list[Sequence[int]](TEXTS)
        sequences.device = device
        for _ in range(2):
            grown.append(grow_forest(sequences.growing(texts)))
            texts = [*sequences.commit(grown[-1])]
        model = drafter._model
        assert isinstance(model, FusedModel)
        if model._steps is not None:
            assert len(model._steps._steps) == len(TEXTS)
            sequences.sources.pop()
            gc.collect()
            assert len(model._steps._steps) == len(TEXTS) - 1, "graphs go with their sequence"
        sequences.made.close()
    for found, expected in zip(grown[2:], grown[:2], strict=True):
        for one, other in zip(found, expected, strict=True):
            assert one.tree.token.tolist() == other.tree.token.tolist()


@torch.no_grad()
def test_prompts_are_batched_in_chunks(
    tmp_path: Path, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lean, "_CHUNK", 32)
    drafters = MAKES["lean"](tmp_path)
    found = grow_forest(Sequences(drafters).growing(TEXTS))
    assert rows[:3] == [32, 32, sum(map(len, TEXTS)) - 64] and max(rows) <= 32
    same(found, Sequences(drafters).alone(TEXTS))


@torch.no_grad()
@pytest.mark.usefixtures("drafters_stay")
def test_single_tree_is_unchanged(tmp_path: Path) -> None:
    """With its costs, and with recording."""
    drafters = MAKES["lean"](tmp_path)
    for policy in (POLICY, replace(POLICY, costs=DEAR), replace(POLICY, costs=DEAR, record=60)):
        (found,) = grow_forest(Sequences(drafters).growing(TEXTS[:1], policy))
        expected = grow(Sequences(drafters).mixture(0), TEXTS[0], policy, 9)
        same([found], [expected])
        assert (found.recorded is None) == (expected.recorded is None) == (not policy.record)


@torch.no_grad()
def test_failed_forward_disables_its_drafters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafters = MAKES["lean"](tmp_path)
    sequences = Sequences(drafters)
    trees = sequences.growing(TEXTS)
    real, calls = FusedModel.hidden_of, iter(range(99))

    def failing(self: FusedModel, given: Any) -> torch.Tensor:
        if next(calls) == 2:
            raise RuntimeError("no room")
        return real(self, given)

    monkeypatch.setattr(FusedModel, "hidden_of", failing)
    found = grow_forest(trees)
    assert [len(tree.tree) > 1 for tree in found] == [True] * len(TEXTS), "what was drafted before is kept"
    assert len(sequences.notices) == len(TEXTS) and "no room" in sequences.notices[0]
    again = grow_forest(sequences.growing(TEXTS))  # the next request tries again
    assert [(len(one.tree), one.tree.token[0]) for one in again] == [(30, ids[-1]) for ids in TEXTS]


@torch.no_grad()
def test_interrupt_cancels_all_trees(tmp_path: Path) -> None:
    drafters = MAKES["lean"](tmp_path)
    sequences, looks = Sequences(drafters), iter(range(99))

    def look() -> None:
        if next(looks) == 6:
            raise KeyboardInterrupt

    trees = [
        TreeGrower(sequences.mixture(i), ids, POLICY, 9, check_cancelled=look) for i, ids in enumerate(TEXTS)
    ]
    with pytest.raises(KeyboardInterrupt):
        grow_forest(trees)
    fresh = Sequences(drafters)
    same(grow_forest(sequences.growing(TEXTS)), grow_forest(fresh.growing(TEXTS)))


def table(sure: float) -> TableDrafter:
    """Return a drafter that gives one token this probability, and four others equal shares."""
    rest = (1 - sure) / 5
    return TableDrafter(torch.log(torch.tensor([[sure, *[rest] * 5]] * 6)))


def growing_of(drafters: Sequence[TableDrafter], policy: GrowthPolicy) -> list[TreeGrower]:
    def scorer() -> Scorer:
        return Scorer(LogitsProcessor(SamplingParams(), 6, []), None, Calibration(), children=5)

    return [TreeGrower(Mixture.single(drafter, scorer()), [0, 2], policy, 12) for drafter in drafters]


def tabulated(sure: Sequence[float], policy: GrowthPolicy) -> list[TreeGrower]:
    return growing_of([table(probability) for probability in sure], policy)


def test_rows_favour_confident_trees_and_none_gets_zero() -> None:
    policy = GrowthPolicy(budget=24, width=4, min_gain=0.0)
    sizes = [len(tree.tree) for tree in grow_forest(tabulated([0.9, 0.6, 0.2], policy), most=20)]
    assert sum(sizes) == 20 and sizes[0] > sizes[1] > sizes[2] >= 1
    sizes = [len(tree.tree) for tree in grow_forest(tabulated([0.9, 0.6, 0.2], policy), most=20, floor=5)]
    assert sum(sizes) == 20 and min(sizes) == 5


@pytest.mark.usefixtures("drafters_stay")
def test_costs_are_those_of_the_whole_batch() -> None:
    """A step shared by two trees takes less time than two steps, and more rows cost more."""
    costs = PassCosts(compute=((1, 1.0), (17, 1.0), (117, 30.0)), step=((1, 0.25), (33, 0.26)))
    policy = GrowthPolicy(budget=64, width=4, costs=costs)
    (by_itself,) = grow_forest(tabulated([0.8], policy))
    together = grow_forest(tabulated([0.8] * 4, policy))
    assert sum(len(tree.tree) for tree in together) <= 18, "no more rows than one pass has room for"
    assert all(tree.steps > by_itself.steps for tree in together)
    crowded = grow_forest(tabulated([0.8], policy), alone=16)
    assert len(crowded[0].tree) < len(by_itself.tree), "others use the space"


@pytest.mark.parametrize(("trees", "times", "longer"), [(1, 1, 1.0), (4, 3, 3.0), (1, 100, 4.0)])
def test_slow_steps_reduce_the_depth(
    trees: int, times: float, longer: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only later trees; the first step and interleaved passes do not count."""
    costs = PassCosts(compute=((1, 1.0), (101, 1.2)), step=((1, 0.1), (33, 0.1)))
    policy, now = GrowthPolicy(budget=64, width=4, costs=costs), [0.0]

    def clock() -> float:
        now[0] += times * 0.1
        return now[0]

    monkeypatch.setattr(
        tree_grower if trees == 1 else best_first, "time", SimpleNamespace(perf_counter=clock)
    )
    before = grow_forest(tabulated([0.8] * trees, policy))
    assert policy.pace.factor == pytest.approx(longer)
    now[0] += 1000
    after = grow_forest(tabulated([0.8] * trees, policy))
    assert policy.pace.factor == pytest.approx(longer)
    saved = max(tree.steps for tree in before) - max(tree.steps for tree in after)
    assert saved > 0 if times > 1 else saved == 0


def test_expensive_step_expands_the_best_nodes_overall() -> None:
    costs = PassCosts(compute=((1, 1.0), (101, 1.2)), step=((1, 0.01), (2, 0.02), (33, 9.0)))
    drafters = [table(probability) for probability in (0.9, 0.3, 0.1)]
    grown = grow_forest(growing_of(drafters, GrowthPolicy(budget=40, width=4, costs=costs)))
    assert len(grown) == 3 and grow_forest([]) == []
    sure, unsure, least = (drafter.steps for drafter in drafters)
    assert sum(map(len, sure)) > sum(map(len, unsure)) >= sum(map(len, least)) >= 1
    assert max(map(len, sure[1:])) <= 2
