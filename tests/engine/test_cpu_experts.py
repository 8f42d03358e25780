"""Experts that the CPU computes beside a GPU: the same tokens as with all of them on it."""

import os
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

import offspec
from offspec import CapacityError, RequestError, StreamError
from offspec.engine.engine import Engine
from offspec.model.device import RUNTIME, SLACK
from offspec.stream.expert_store import ExpertStore
from tests.engine.test_mxfp4 import write_both
from tests.support.device_experts import (
    BUDGETS,
    CUDA,
    GREEDY,
    PROMPT,
    SAMPLED,
    SHORT,
    Written,
    exact_products,
    written,
)
from tests.support.expert_models import EXPERT_FAMILIES, by_need, write_experts
from tests.support.products import some
from tests.support.tiny_models import tiny_engine, write_model
from tests.support.weight_files import as_it_is

__all__ = ["exact_products", "written"]
pytestmark = pytest.mark.gpu


def loaded(model: Written, share: float, draft: str = "none", **settings: object) -> Engine:
    """With slots in RAM for a share of the experts."""
    drafter, placement = model.folder if draft == "same" else draft, model.beside(share)
    return tiny_engine(
        model.folder, drafter, budget=BUDGETS[draft], placement=placement, device=CUDA, **settings
    )


@pytest.mark.parametrize(
    ("family", "share", "draft"),
    some(
        product(EXPERT_FAMILIES, (0.0, 0.3, 1.0), BUDGETS),
        ("mixtral", 0.3, "same"),
        ("gpt_oss", 1.0, "none"),
        ("qwen2_moe", 0.0, "none"),
        rare=lambda setting: setting[1:] != (0.3, "same"),
        one_in=2,
    ),
)
def test_tokens_do_not_depend_on_what_computes_experts(
    family: str, share: float, draft: str, written: Callable[[str], Written]
) -> None:
    model = written(family)
    with loaded(model, share, draft) as engine:
        store = engine._assembly.target.store
        assert isinstance(store, ExpertStore), "nothing is kept on the device, or copied to it"
        for params in (GREEDY, SAMPLED):
            result = engine.generate(PROMPT, params)
            assert result.token_ids == model.says[params] and result.cpu_experts
        assert store.stats.asked and (store.stats.hits == store.stats.asked) == (share == 1)


@pytest.mark.exhaustive
def test_in_bfloat16_what_is_in_memory_changes_nothing(written: Callable[[str], Written]) -> None:
    """All of a layer's experts are the CPU's, so a row's bits do not depend on what was asked for before."""
    model, says = written("mixtral"), set[tuple[int, ...]]()
    for share, draft in ((0.0, "none"), (1.0, "same")):
        with loaded(model, share, draft, dtype=torch.bfloat16) as engine:
            says |= {engine.generate(PROMPT, SAMPLED).token_ids for _ in range(2)}
    assert len(says) == 1


@pytest.mark.exhaustive
def test_experts_in_codes_are_unpacked_on_the_cpu(tmp_path: Path) -> None:
    torch.manual_seed(3)
    dense, packed = write_both(tmp_path)
    with tiny_engine(dense, "none", budget=1) as engine:
        expected = engine.generate(PROMPT, SAMPLED).token_ids
    for slots in (3, 12):
        placement = by_need(3, 0, slots)
        with tiny_engine(packed, "none", budget=1, placement=placement, device=CUDA) as engine:
            assert engine.generate(PROMPT, SAMPLED).token_ids == expected


def test_an_expert_that_does_not_come_is_one_error_and_the_engine_lives(
    written: Callable[[str], Written], tmp_path: Path
) -> None:
    """A truncated file in the middle of an answer, and answers that are broken off."""
    model = written("mixtral")
    folder = Path(shutil.copytree(model.folder, tmp_path / "copy"))
    file = folder / "model.safetensors"
    size, put_back = file.stat().st_size, as_it_is(file)
    with tiny_engine(folder, "none", budget=1, placement=model.beside(0.3), device=CUDA) as engine:
        os.truncate(file, size // 3)
        with pytest.raises(StreamError, match="ended early"):
            engine.generate(PROMPT[::-1], GREEDY)
        put_back()
        assert engine.generate(PROMPT, GREEDY).token_ids == model.says[GREEDY]
        for after in (1, 2):
            stream = engine.stream(PROMPT, SAMPLED)
            for _ in range(after):
                next(stream)
            stream.close()
        assert engine.generate(PROMPT, SAMPLED).token_ids == model.says[SAMPLED]


def test_what_is_asked_for_is_done_whatever_memory_there_is(
    written: Callable[[str], Written], tmp_path: Path
) -> None:
    """The GPU that would hold all has no experts either, and much less of it is enough."""
    large = {"hidden_size": 128, "intermediate_size": 256, "num_local_experts": 16}
    folder = write_experts(tmp_path / "model", "mixtral", **large)

    def load(way: str, vram: int, memory: int) -> Engine:
        settings = {"draft": "none", "dtype": "float32", "context": 64, "device": "cuda"}
        return offspec.load(str(folder), vram=vram, memory=memory, experts=way, **settings)

    plenty, needed = 3_000_000_000, dict[str, int]()
    for way in ("cpu", "gpu"):
        with pytest.raises(CapacityError, match="`vram`") as caught:
            load(way, RUNTIME + SLACK, plenty)
        needed[way] = caught.value.needed
    assert needed["cpu"] < needed["gpu"]
    with pytest.raises(CapacityError, match=r"experts in RAM .*`memory`") as caught:
        load("cpu", needed["cpu"], 10_000_000)
    says = set[tuple[int, ...]]()
    for way, vram, memory in (
        ("cpu", needed["cpu"], caught.value.needed),
        ("cpu", plenty, plenty),
        ("auto", plenty, plenty),
    ):
        with load(way, vram, memory) as engine:
            placement, result = engine.placement, engine.generate(PROMPT, SHORT)
            says.add(result.token_ids)
            slots = placement["host_expert_slots"]
            assert result.cpu_experts == placement["cpu_experts"] == (way == "cpu")
            assert placement["expert_slots"] == 0
            assert 8 <= slots < 48 if memory < plenty else slots == 48 * (way == "cpu")
    assert len(says) == 1


def test_where_it_means_nothing_a_notice_says_so(tmp_path: Path) -> None:
    dense, mixture = write_model(tmp_path / "dense"), write_experts(tmp_path / "mixture", "mixtral")
    settings = {"draft": "none", "dtype": "float32", "context": 64, "budget": 1}
    for model, device, way, why in (
        (dense, "cuda", "cpu", "this model has none"),
        (mixture, "cpu", "auto", ""),
    ):
        told = list[str]()
        notify = lambda event, told=told: told.append(getattr(event, "text", ""))  # noqa: E731
        offspec.load(str(model), device=device, experts=way, notify=notify, **settings).close()
        found = [text for text in told if "`experts`" in text]
        assert len(found) == bool(why) and all(why in text for text in found)
    with pytest.raises(RequestError, match="leave out `experts`, which is for a GPU"):
        offspec.load(str(mixture), device="cpu", experts="cpu")
    with pytest.raises(RequestError, match="leave out `cpu_layers` or `experts`"):
        offspec.load(str(mixture), device="cuda", experts="cpu", cpu_layers=1)
    with pytest.raises(RequestError, match="'auto', 'gpu' or 'cpu'"):
        offspec.load(str(mixture), experts="tpu")
