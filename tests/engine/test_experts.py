"""Experts that are read when they are asked for: the same tokens as with all of them in memory."""

import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch

import offspec
from offspec import CapacityError, SamplingParams, StreamError
from offspec.model.expert_unit import ExpertUnit
from offspec.stream.expert_store import ExpertStore
from offspec_planners.placement import Placement, Tier
from tests.support.expert_models import EXPERT_FAMILIES, by_need, write_experts
from tests.support.products import some
from tests.support.tiny_models import open_model, tiny_engine, write_model
from tests.support.weight_files import as_it_is

PROMPT = [3 + (7 * i * i + i) % 90 for i in range(21)]
PARAMS = tuple(
    SamplingParams(temperature=temperature, seed=6, max_tokens=14, ignore_eos=True)
    for temperature in (0.0, 0.7, 1.0)
)
SHARES = (0.0, 0.3, 1.0)
BUDGETS = {"none": 1, "good": 24, "substitute": 64, "hostile": 7}
# Experts stored one by one and as a stack, and in a model that has a state and layers without experts.
USUAL = (
    ("mixtral", 0.0, "none"),
    ("mixtral", 0.3, "substitute"),
    ("gpt_oss", 0.0, "good"),
    ("lfm2_moe", 0.3, "hostile"),
)
LARGE = {"hidden_size": 256, "intermediate_size": 1024, "num_local_experts": 16}


@dataclass(frozen=True)
class Written:
    """A model, and what it says without speculation and with everything in memory."""

    folder: Path
    layers: int
    experts: int
    vocabulary: int
    says: dict[SamplingParams, tuple[int, ...]]

    def placement(self, share: float) -> Placement:
        """With slots for a share of the experts, one at least."""
        return by_need(self.layers, max(int(share * self.experts), 1))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    @cache
    def write(family: str) -> Written:
        folder = write_experts(tmp_path_factory.mktemp(family) / "model", family)
        opened = open_model(folder)
        layers, experts, words = len(opened.layers), opened.experts.count, opened.skeleton.vocab_size
        opened.close()
        with tiny_engine(folder, "none", budget=1, resident=range(layers), slots=0) as engine:
            says = {params: engine.generate(PROMPT, params).token_ids for params in PARAMS}
        assert max(len(set(tokens)) for tokens in says.values()) > 6
        return Written(folder, layers, experts, words, says)

    return write


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    @cache
    def write(words: int) -> Path:
        return write_model(tmp_path_factory.mktemp("hostile") / "model", vocab_size=words, seed=99)

    return write


@pytest.mark.parametrize(
    ("family", "share", "draft"), some(product(EXPERT_FAMILIES, SHARES, BUDGETS), *USUAL, one_in=9)
)
def test_tokens_do_not_depend_on_what_is_kept(
    family: str,
    share: float,
    draft: str,
    written: Callable[[str], Written],
    hostile: Callable[[int], Path],
) -> None:
    model = written(family)
    assert model.experts > 2, "they can be read one by one"
    drafts = {"good": model.folder, "hostile": hostile(model.vocabulary)}
    with tiny_engine(
        model.folder, drafts.get(draft, draft), budget=BUDGETS[draft], placement=model.placement(share)
    ) as engine:
        for params in PARAMS:
            assert engine.generate(PROMPT, params).token_ids == model.says[params], params


def test_a_prompt_reads_each_expert_once(written: Callable[[str], Written]) -> None:
    """However many chunks it has, as long as there are slots for the experts of one layer."""
    model = written("mixtral")
    placement, one = by_need(model.layers, model.experts // model.layers), replace(PARAMS[0], max_tokens=1)
    with tiny_engine(model.folder, "none", budget=1, placement=placement, chunk=4) as engine:
        assert engine.generate(PROMPT, one).token_ids == model.says[PARAMS[0]][:1]
        store = engine._assembly.target.store
        assert store is not None and store.stats.asked > 2 * model.experts
        assert store.stats.asked - store.stats.hits <= model.experts


@pytest.mark.exhaustive
def test_memory_decides(tmp_path: Path) -> None:
    """With too little of it experts are read when they are asked for, and more of it keeps more of them."""
    folder = write_experts(tmp_path / "model", "mixtral", **LARGE)
    with pytest.raises(CapacityError, match="experts") as caught:
        offspec.load(str(folder), memory=10_000_000, draft="none", dtype="float32")
    least, seen, says = caught.value.needed, list[int](), set[tuple[int, ...]]()
    for more in (0, 40_000_000, 1_000_000_000):
        with offspec.load(
            str(folder), memory=least + 20_000_000 + more, draft="none", dtype="float32"
        ) as engine:
            says.add(engine.generate(PROMPT, PARAMS[1]).token_ids)
            seen.append(engine.placement["expert_slots"])
    assert 8 <= seen[0] < seen[1] < 48 and seen[2] == 0, "all of it fits"
    assert len(says) == 1


@pytest.mark.exhaustive
def test_what_was_used_most_is_there_in_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read ahead, as far as there are slots; a file that is damaged is as good as none."""
    monkeypatch.setenv("OFFSPEC_CACHE", str(tmp_path / "cache"))
    folder = write_experts(tmp_path / "model", "mixtral", **LARGE)
    with pytest.raises(CapacityError) as caught:
        offspec.load(str(folder), memory=10_000_000, draft="none", dtype="float32")
    memory = caught.value.needed + 60_000_000

    def run(learn: bool = True) -> tuple[tuple[int, ...], float]:
        with offspec.load(str(folder), memory=memory, draft="none", dtype="float32", learn=learn) as engine:
            store = engine._assembly.target.store
            assert isinstance(store, ExpertStore)
            while store._ahead or any(
                not filling.whole for filling in list(store._pool.round.fillings.values())
            ):
                time.sleep(0.001)
            said = engine.generate(PROMPT, replace(PARAMS[1], max_tokens=6)).token_ids
            return said, store.stats.hit_rate

    said, cold = run(learn=False)
    assert not list(tmp_path.glob("cache/experts/*")), "nothing is kept where nothing is to be learnt"
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
    """Behind the slots of experts, and behind those of layers."""
    model = written("mixtral")
    placed = replace(model.placement(0.3), tiers=(Tier.DISK,) * model.layers, slots=2)

    def failing(*args: object, **named: object) -> None:
        raise CapacityError("too little", needed=2, given=1)

    monkeypatch.setattr(f"offspec.model.loaded.{part}", failing)
    opened, before = open_model(model.folder), set(threading.enumerate())
    with pytest.raises(CapacityError):
        opened.load(placed, 64, lambda done, total: None)
    opened.close()
    assert not set(threading.enumerate()) - before


@pytest.fixture
def model(written: Callable[[str], Written], tmp_path: Path) -> Written:
    """A copy that the test may damage."""
    whole = written("mixtral")
    return replace(whole, folder=Path(shutil.copytree(whole.folder, tmp_path / "copy")))


def test_an_expert_that_cannot_be_read_is_one_error_and_the_engine_lives(
    model: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A truncated file, and a failing disk, in the middle of an answer."""
    file = model.folder / "model.safetensors"
    size, put_back = file.stat().st_size, as_it_is(file)
    with tiny_engine(model.folder, "none", budget=1, placement=model.placement(0.3)) as engine:
        params = PARAMS[0]
        assert engine.generate(PROMPT, params).token_ids == model.says[params]
        os.truncate(file, size // 3)
        with pytest.raises(StreamError, match="ended early") as caught:
            engine.generate(PROMPT[::-1], params)
        assert caught.value.file == file
        put_back()
        assert engine.generate(PROMPT, params).token_ids == model.says[params]
        with monkeypatch.context() as patched:
            patched.setattr(os, "preadv", _failing)
            with pytest.raises(StreamError, match="Input/output error"):
                engine.generate(PROMPT[::-1], params)
        assert engine.generate(PROMPT, params).token_ids == model.says[params]


def _failing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
    raise OSError(5, "Input/output error")


@pytest.mark.exhaustive
def test_an_answer_that_is_broken_off_leaves_no_trace(
    written: Callable[[str], Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between tokens, and by Ctrl-C in the middle of a layer's experts."""
    model, real, left = written("mixtral"), ExpertUnit.made, 0

    def struck(unit: ExpertUnit, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return real(unit, memory)

    monkeypatch.setattr(ExpertUnit, "made", struck)
    with tiny_engine(model.folder, "none", budget=1, placement=model.placement(0.3)) as engine:
        for after in range(1, 5):
            stream = engine.stream(PROMPT, PARAMS[1])
            for _ in range(after):
                next(stream)
            stream.close()
            assert engine.generate(PROMPT, PARAMS[1]).token_ids == model.says[PARAMS[1]]
            left = 7 * after
            with pytest.raises(KeyboardInterrupt):
                engine.generate(PROMPT[::-1], PARAMS[1])
            assert engine.generate(PROMPT, PARAMS[1]).token_ids == model.says[PARAMS[1]]
