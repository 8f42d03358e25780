"""On-demand expert loading emits the same tokens as with all experts in memory."""

import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import offspec
from offspec import CapacityError, StreamError
from offspec.engine.engine import Engine
from offspec.model.expert_unit import ExpertUnit
from offspec.stream.expert_store import ExpertStore
from offspec_planners.placement import Placement, Tier
from tests.support.answers import generate_tokens, sampling
from tests.support.exhaustive import sampled_params
from tests.support.expert_models import EXPERT_FAMILIES, on_demand_placement, write_experts
from tests.support.tiny_models import open_model, tiny_engine, write_model
from tests.support.waiting import wait_until
from tests.support.weight_files import restorer

PROMPT = [3 + (7 * i * i + i) % 90 for i in range(21)]
GREEDY, SAMPLED = PARAMS = sampling(0.0, 14), sampling(0.8, 14)
BUDGETS = {"none": 1, "good": 24, "self": 64, "hostile": 7}
# Experts stored one by one and as a stack, and in a model that has a state and layers without experts.
USUAL = (
    ("mixtral", 0.0, "none"),
    ("mixtral", 0.3, "self"),
    ("gpt_oss", 0.0, "good"),
    ("lfm2_moe", 0.3, "hostile"),
)
LARGE = {"hidden_size": 256, "intermediate_size": 1024, "num_local_experts": 16}


@dataclass(frozen=True)
class Written:
    """A model, and its answer without speculation and with all weights in memory."""

    folder: Path
    layers: int
    experts: int
    vocabulary: int
    says: list[tuple[int, ...]]

    def placement(self, share: float) -> Placement:
        """Return an engine with slots for a share of the experts, at least one slot."""
        return on_demand_placement(self.layers, max(int(share * self.experts), 1))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    @cache
    def write(family: str) -> Written:
        folder = write_experts(tmp_path_factory.mktemp(family) / "model", family)
        opened = open_model(folder)
        layers, experts, words = len(opened.layers), opened.experts.count, opened.skeleton.vocab_size
        opened.close()
        said = generate_tokens(folder, *PARAMS, prompt=PROMPT, resident=range(layers), slots=0)
        assert max(len(set(tokens)) for tokens in said) > 6 and experts > 2
        return Written(folder, layers, experts, words, said)

    return write


@pytest.mark.parametrize(
    ("family", "share", "draft"),
    sampled_params([*USUAL, *((family, 0.3, "good") for family in EXPERT_FAMILIES)], *USUAL, one_in=3),
)
def test_tokens_do_not_depend_on_what_is_kept(
    family: str, share: float, draft: str, written: Callable[[str], Written], tmp_path: Path
) -> None:
    model, guesses = written(family), draft
    if draft == "good":
        guesses = str(model.folder)
    elif draft == "hostile":
        guesses = str(write_model(tmp_path, vocab_size=model.vocabulary, seed=99))
    given = {"budget": BUDGETS[draft], "placement": model.placement(share)}
    assert generate_tokens(model.folder, *PARAMS, draft=guesses, prompt=PROMPT, **given) == model.says


def test_a_prompt_reads_each_expert_once(written: Callable[[str], Written]) -> None:
    """Any number of chunks, while there are slots for the experts of one layer."""
    model = written("mixtral")
    placement = on_demand_placement(model.layers, model.experts // model.layers)
    with tiny_engine(model.folder, "none", budget=1, placement=placement, chunk=4) as engine:
        assert engine.generate(PROMPT, sampling(0.0, 1)).token_ids == model.says[0][:1]
        store = engine._assembly.target.store
        assert store is not None and store.stats.requested > 2 * model.experts
        assert store.stats.requested - store.stats.hits <= model.experts


def load(folder: Path, memory: int, **settings: Any) -> Engine:
    return offspec.load(str(folder), memory=memory, draft="none", dtype="float32", context=128, **settings)


def least_memory(folder: Path) -> int:
    with pytest.raises(CapacityError, match="experts") as caught:
        load(folder, 10_000_000)
    return caught.value.needed


@pytest.mark.exhaustive
def test_memory_decides(tmp_path: Path) -> None:
    """Below the size of the model, experts are loaded on demand; more memory keeps more of them."""
    folder = write_experts(tmp_path / "model", "mixtral", **LARGE)
    least, seen, said = least_memory(folder) + 20_000_000, list[int](), set[tuple[int, ...]]()
    for more in (0, 40_000_000, 1_000_000_000):
        with load(folder, least + more) as engine:
            said.add(engine.generate(PROMPT, SAMPLED).token_ids)
            seen.append(engine.placement["expert_slots"])
    assert 8 <= seen[0] < seen[1] < 48 and seen[2] == 0, "all of it fits"
    assert len(said) == 1


@pytest.mark.exhaustive
def test_most_used_experts_are_prefetched_in_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts of the usage record are prefetched up to the number of slots; a damaged record is ignored."""
    monkeypatch.setenv("OFFSPEC_CACHE", str(tmp_path / "cache"))
    folder = write_experts(tmp_path / "model", "mixtral", **LARGE)
    memory = least_memory(folder) + 60_000_000

    def run(learn: bool = True) -> tuple[tuple[int, ...], float]:
        with load(folder, memory, learn=learn) as engine:
            store = engine._assembly.target.store
            assert isinstance(store, ExpertStore)
            wait_until(
                lambda: (
                    not store._ahead
                    and all(filling.is_complete for filling in list(store._pool.round.reads.values()))
                )
            )
            said = engine.generate(PROMPT, sampling(0.8, 6)).token_ids
            return said, store.stats.hit_rate

    said, cold = run(learn=False)
    assert not list(tmp_path.glob("cache/experts/*")), "nothing is saved if learning is disabled"
    assert run()[0] == said
    again, warm = run()
    assert again == said and warm > cold + 0.1
    (file,) = tmp_path.glob("cache/experts/*")
    for damaged in ("{", '{"version": 1, "shares": [2]}'):
        file.write_text(damaged)
        again, rate = run(learn=False)
        assert again == said and rate < warm - 0.05


@pytest.mark.parametrize("part", ["LayerFeeder", "set_row_counts"])
def test_loading_that_fails_leaves_no_threads(
    part: str, written: Callable[[str], Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft that streams after the slots of experts, and after the slots of layers."""
    model = written("mixtral")
    placed = replace(model.placement(0.3), tiers=(Tier.DISK,) * model.layers, slots=2)

    def failing(*args: object, **named: object) -> None:
        raise CapacityError("too little", needed=2, given=1)

    monkeypatch.setattr(f"offspec.model.loading.{part}", failing)
    opened, before = open_model(model.folder), set(threading.enumerate())
    with pytest.raises(CapacityError):
        opened.load(placed, 64, lambda done, total: None)
    opened.close()
    assert not set(threading.enumerate()) - before


def test_an_expert_that_cannot_be_read_is_one_error_and_the_engine_lives(
    written: Callable[[str], Written], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A truncated file, and a failing disk, in the middle of an answer."""
    model = written("mixtral")
    file = Path(shutil.copytree(model.folder, tmp_path / "copy")) / "model.safetensors"
    put_back = restorer(file)
    with tiny_engine(file.parent, "none", budget=1, placement=model.placement(0.3)) as engine:
        assert engine.generate(PROMPT, GREEDY).token_ids == model.says[0]
        os.truncate(file, file.stat().st_size // 3)
        with pytest.raises(StreamError, match="ended early") as caught:
            engine.generate(PROMPT[::-1], GREEDY)
        assert caught.value.file == file
        put_back()
        assert engine.generate(PROMPT, GREEDY).token_ids == model.says[0]
        with monkeypatch.context() as patched:
            patched.setattr(os, "preadv", _failing)
            with pytest.raises(StreamError, match="Input/output error"):
                engine.generate(PROMPT[::-1], GREEDY)
        assert engine.generate(PROMPT, GREEDY).token_ids == model.says[0]


def _failing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
    raise OSError(5, "Input/output error")


def test_an_answer_that_is_broken_off_leaves_no_trace(
    written: Callable[[str], Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupts between tokens, and by Ctrl-C while a layer's experts are read."""
    model, real, left = written("mixtral"), ExpertUnit.make_parameters, 0

    def struck(unit: ExpertUnit, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return real(unit, memory)

    monkeypatch.setattr(ExpertUnit, "make_parameters", struck)
    with tiny_engine(model.folder, "none", budget=1, placement=model.placement(0.3)) as engine:
        for after in (1, 3):
            stream = engine.stream(PROMPT, SAMPLED)
            for _ in range(after):
                next(stream)
            stream.close()
            assert engine.generate(PROMPT, SAMPLED).token_ids == model.says[1]
            left = 7 * after
            with pytest.raises(KeyboardInterrupt):
                engine.generate(PROMPT[::-1], SAMPLED)
            assert engine.generate(PROMPT, SAMPLED).token_ids == model.says[1]
