"""Experts in slots of a device, in RAM behind it and on disk: the same tokens as with all of them on it."""

import os
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

import offspec
from offspec import CapacityError, StreamError
from offspec.engine.engine import Engine
from offspec.model.device import RUNTIME, SLACK
from offspec.stream.device_experts import DeviceExpertStore
from offspec_planners.placement import Placement, Tier
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
from tests.support.tiny_models import tiny_engine
from tests.support.weight_files import as_it_is

__all__ = ["exact_products", "written"]
pytestmark = pytest.mark.gpu
PARAMS = (GREEDY, SAMPLED)
SHARES = (0.0, 0.3, 1.0)  # of experts on the device, and in RAM


def stores(engine: Engine) -> DeviceExpertStore:
    store = engine._assembly.target.store
    assert isinstance(store, DeviceExpertStore)
    return store


@pytest.mark.parametrize(
    ("family", "near", "behind", "draft"),
    some(
        product(EXPERT_FAMILIES, SHARES, SHARES, BUDGETS),
        ("mixtral", 0.0, 0.0, "same"),
        ("mixtral", 0.3, 1.0, "none"),
        ("mixtral", 1.0, 0.3, "none"),
        rare=lambda setting: setting[1:] != (0.3, 0.3, "same"),
        one_in=2,
    ),
)
def test_tokens_do_not_depend_on_what_is_kept_where(
    family: str, near: float, behind: float, draft: str, written: Callable[[str], Written]
) -> None:
    model = written(family)
    drafter = model.folder if draft == "same" else draft
    placement = model.placement(near, behind)
    with tiny_engine(
        model.folder, drafter, budget=BUDGETS[draft], placement=placement, device=CUDA
    ) as engine:
        store, loaded = stores(engine), stores(engine).read_stats.bytes_moved
        for params in PARAMS:
            assert engine.generate(PROMPT, params).token_ids == model.says[params], params
        assert (loaded > 0) == (behind == 1)
        assert (store.read_stats.bytes_moved == loaded) == (behind == 1), "RAM that holds all reads nothing"
        target = engine._assembly.target
        assert (target.bytes_streamed, target.bytes_read) == (
            store.copy_stats.bytes_moved,
            store.read_stats.bytes_moved,
        ), "nothing else streams"
        if near == 1:
            assert engine.generate(PROMPT, PARAMS[0]).token_ids == model.says[PARAMS[0]]
            moves = [move for unit in store.kept for move in store.layouts[unit].moves_to(CUDA)]
            copied = sum(move.length for move in moves)
            assert store.copy_stats.bytes_moved == copied > 0, "what is on the device is not copied again"


@pytest.mark.exhaustive
def test_layers_that_stream_ask_for_experts_too(written: Callable[[str], Written]) -> None:
    """All else of a layer comes from RAM or disk through the rings, a head that streams as well."""
    model = written("mixtral")
    tiers = tuple((Tier.DISK, Tier.HOST, Tier.DEVICE)[layer % 3] for layer in range(model.layers))
    placement = Placement(tiers, 2, 2, Tier.DISK, expert_slots=3, host_expert_slots=5)
    with tiny_engine(model.folder, "none", budget=1, placement=placement, device=CUDA, chunk=4) as engine:
        for params in PARAMS:
            assert engine.generate(PROMPT, params).token_ids == model.says[params]


@pytest.mark.parametrize(("near", "behind"), some([(1, 1), (3, 8), (12, 8)], (3, 8)))
def test_experts_in_codes_are_unpacked_on_the_device(near: int, behind: int, tmp_path: Path) -> None:
    torch.manual_seed(3)
    dense, packed = write_both(tmp_path)
    with tiny_engine(dense, "none", budget=1) as engine:
        expected = engine.generate(PROMPT, PARAMS[1]).token_ids
    with tiny_engine(packed, "none", budget=1, placement=by_need(3, near, behind), device=CUDA) as engine:
        assert engine.generate(PROMPT, PARAMS[1]).token_ids == expected


@pytest.mark.exhaustive
def test_in_bfloat16_what_is_kept_where_changes_nothing(written: Callable[[str], Written]) -> None:
    model, says = written("mixtral"), set[tuple[int, ...]]()
    for near, behind, draft, budget in (
        (0.0, 0.0, "none", 1),
        (0.3, 1.0, model.folder, 24),
        (1.0, 0.3, "none", 1),
    ):
        with tiny_engine(
            model.folder,
            draft,
            budget=budget,
            placement=model.placement(near, behind),
            device=CUDA,
            dtype=torch.bfloat16,
        ) as engine:
            says.add(engine.generate(PROMPT, PARAMS[1]).token_ids)
    assert len(says) == 1


@pytest.mark.parametrize("near", some([0.0, 0.3], 0.3))
def test_an_expert_that_does_not_come_is_one_error_and_the_engine_lives(
    near: float, written: Callable[[str], Written], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A truncated file, and a copy that fails, in the middle of an answer."""
    model, params = written("mixtral"), PARAMS[0]
    folder = Path(shutil.copytree(model.folder, tmp_path / "copy"))
    file = folder / "model.safetensors"
    size, put_back = file.stat().st_size, as_it_is(file)
    with tiny_engine(folder, "none", budget=1, placement=model.placement(near, 0.3), device=CUDA) as engine:
        assert engine.generate(PROMPT, params).token_ids == model.says[params]
        os.truncate(file, size // 3)
        with pytest.raises(StreamError, match="ended early"):
            engine.generate(PROMPT[::-1], params)
        put_back()
        assert engine.generate(PROMPT, params).token_ids == model.says[params]
        with monkeypatch.context() as patched:
            patched.setattr(torch.cuda.Event, "synchronize", _failing)
            with pytest.raises(StreamError, match="copying layer"):
                engine.generate(PROMPT[::-1], params)
        assert engine.generate(PROMPT, params).token_ids == model.says[params]


def _failing(event: torch.cuda.Event) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_an_answer_that_is_broken_off_leaves_no_trace(written: Callable[[str], Written]) -> None:
    model, params = written("mixtral"), PARAMS[1]
    placement = model.placement(0.3, 0.3)
    with tiny_engine(model.folder, "none", budget=1, placement=placement, device=CUDA) as engine:
        for after in (1, 2):
            stream = engine.stream(PROMPT, params)
            for _ in range(after):
                next(stream)
            stream.close()
            assert engine.generate(PROMPT, params).token_ids == model.says[params]


def test_memory_decides(tmp_path: Path) -> None:
    """The device keeps what has room beside all else, and RAM the same behind it."""
    large = {"hidden_size": 128, "intermediate_size": 512, "num_local_experts": 8}
    folder = write_experts(tmp_path / "model", "mixtral", **large)

    def load(vram: int, memory: int) -> Engine:
        return offspec.load(
            str(folder), device="cuda", vram=vram, memory=memory, draft="none", dtype="float32", context=32
        )

    needed, plenty = dict[str, int](), 4_000_000_000
    for name, vram, memory in (("`vram`", RUNTIME + SLACK, plenty), ("`memory`", 3_000_000_000, 10_000_000)):
        with pytest.raises(CapacityError, match=name) as caught:
            load(vram, memory)
        needed[name] = caught.value.needed
    least, ram = needed["`vram`"], needed["`memory`"] + 5_000_000
    assert least > RUNTIME + SLACK
    says, seen = set[tuple[int, ...]](), list[tuple[int, int]]()
    for vram, memory in ((least, ram), (least + 10_000_000, plenty), (plenty // 2, plenty)):
        with load(vram, memory) as engine:
            says.add(engine.generate(PROMPT, SHORT).token_ids)
            seen.append((engine.placement["expert_slots"], engine.placement["host_expert_slots"]))
    assert len(says) == 1
    (near, behind), (more, every), fits = seen
    assert 8 <= near < more < 24 and 8 <= behind < every == 24 and fits == (0, 0)
