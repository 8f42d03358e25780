"""Experts in VRAM slots, in RAM, on disk or computed by the CPU: the same tokens."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offspec
from offspec import CapacityError, RequestError, StreamError
from offspec.engine.engine import Engine
from offspec.model.devices import RUNTIME, SLACK
from offspec.stream.device_expert_store import DeviceExpertStore
from offspec.stream.expert_store import ExpertStore
from offspec_planners.placement import Placement, Tier
from tests.support.answers import generate_tokens, sampling
from tests.support.device_experts import CUDA, GREEDY, PROMPT, SAMPLED, SavedModel, written
from tests.support.exhaustive import sampled_params
from tests.support.expert_models import EXPERT_FAMILIES, on_demand_placement, write_experts
from tests.support.mxfp4_models import write_both
from tests.support.tiny_models import tiny_engine, write_model
from tests.support.weight_files import restorer

__all__ = ["written"]
pytestmark = pytest.mark.gpu
Write = Callable[[str], SavedModel]
MOST = {"hidden_size": 128, "intermediate_size": 512, "num_local_experts": 8}
PLENTY = 4_000_000_000


def loaded(model: SavedModel, placement: Placement, draft: str = "none", **settings: Any) -> Engine:
    drafter, budget = (model.folder, 12) if draft == "same" else (draft, 1)
    return tiny_engine(model.folder, drafter, budget=budget, placement=placement, device=CUDA, **settings)


@pytest.mark.parametrize(
    ("family", "near", "behind", "draft"),
    sampled_params(
        [
            ("mixtral", 0.0, 0.0, "same"),
            ("mixtral", 0.3, 1.0, "none"),
            ("mixtral", 1.0, 0.3, "none"),
            *((family, 0.3, 0.3, "same") for family in EXPERT_FAMILIES),
        ],
        ("mixtral", 0.0, 0.0, "same"),
        ("mixtral", 0.3, 1.0, "none"),
        ("mixtral", 1.0, 0.3, "none"),
        one_in=5,
    ),
)
def test_tokens_do_not_depend_on_what_is_kept_where(
    family: str, near: float, behind: float, draft: str, written: Write
) -> None:
    model = written(family)
    with loaded(model, model.placement(near, behind), draft) as engine:
        target: Any = engine._assembly.target
        store = target.store
        assert isinstance(store, DeviceExpertStore)
        before = store.read_stats.bytes_moved
        for params, tokens in zip((GREEDY, SAMPLED), model.says, strict=True):
            assert engine.generate(PROMPT, params).token_ids == tokens, params
        copied, read = store.copy_stats.bytes_moved, store.read_stats.bytes_moved
        assert (before > 0) == (read == before) == (behind == 1), "RAM that holds all reads nothing"
        moved = target.bytes_moved
        assert (moved.streamed, moved.read) == (copied, read), "nothing else streams"
        if near == 1:
            assert engine.generate(PROMPT, GREEDY).token_ids == model.says[0]
            moves = [move for unit in store.cached_units for move in store.layouts[unit].moves_to(CUDA)]
            assert store.copy_stats.bytes_moved == sum(move.length for move in moves) > 0, "none once more"


@pytest.mark.parametrize(
    ("family", "share", "draft"),
    sampled_params(
        [
            ("gpt_oss", 1.0, "none"),
            ("qwen2_moe", 0.0, "none"),
            *((family, 0.3, "same") for family in EXPERT_FAMILIES),
        ],
        ("gpt_oss", 1.0, "none"),
        ("qwen2_moe", 0.0, "none"),
        ("mixtral", 0.3, "same"),
        one_in=5,
    ),
)
def test_tokens_do_not_depend_on_what_computes_experts(
    family: str, share: float, draft: str, written: Write
) -> None:
    model = written(family)
    with loaded(model, model.cpu_placement(share), draft) as engine:
        store = engine._assembly.target.store
        assert isinstance(store, ExpertStore), "nothing is kept on the device, or copied to it"
        for params, tokens in zip((GREEDY, SAMPLED), model.says, strict=True):
            result = engine.generate(PROMPT, params)
            assert result.token_ids == tokens and result.cpu_experts
        assert store.stats.requested and (store.stats.hits == store.stats.requested) == (share == 1)


def test_layers_that_stream_ask_for_experts_too(written: Write) -> None:
    """The rest of each layer, and a streamed output head, come from RAM or disk through the ring buffers."""
    model = written("mixtral")
    tiers = tuple((Tier.DISK, Tier.HOST, Tier.DEVICE)[layer % 3] for layer in range(model.layers))
    placement = Placement(tiers, 2, 2, Tier.DISK, expert_slots=3, host_expert_slots=5)
    given = {"placement": placement, "device": CUDA, "chunk": 4}
    assert generate_tokens(model.folder, SAMPLED, prompt=PROMPT, **given) == model.says[1:]


@pytest.mark.parametrize(("near", "behind"), [(3, 8), (0, 3)], ids=["on the device", "on the CPU"])
def test_experts_in_codes_are_unpacked_where_they_are_computed(
    near: int, behind: int, tmp_path: Path
) -> None:
    dense, packed = write_both(tmp_path)
    found = generate_tokens(packed, SAMPLED, placement=on_demand_placement(3, near, behind), device=CUDA)
    assert found == generate_tokens(dense, SAMPLED)


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["device", "cpu"])
def test_in_bfloat16_what_is_in_memory_changes_nothing(way: str, written: Write) -> None:
    """The CPU computes all experts of a layer or none, so bits do not depend on earlier requests."""
    model, said = written("mixtral"), set[tuple[int, ...]]()
    for share, draft in ((0.0, "none"), (0.3, "same"), (1.0, "none")):
        placement = model.cpu_placement(share) if way == "cpu" else model.placement(share, 1 - share)
        with loaded(model, placement, draft, dtype=torch.bfloat16) as engine:
            said |= {engine.generate(PROMPT, SAMPLED).token_ids for _ in range(2)}
    assert len(said) == 1


@pytest.mark.parametrize("way", sampled_params(["device", "cpu"], "device"))
def test_an_expert_that_does_not_come_is_one_error_and_the_engine_lives(
    way: str, written: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A truncated file and a failing copy during an answer, and cancelled answers."""
    model = written("mixtral")
    folder = Path(shutil.copytree(model.folder, tmp_path / "copy"))
    file = folder / "model.safetensors"
    put_back = restorer(file)
    placement = model.placement(0.3, 0.3) if way == "device" else model.cpu_placement(0.3)
    with tiny_engine(folder, "none", budget=1, placement=placement, device=CUDA) as engine:
        os.truncate(file, file.stat().st_size // 3)
        with pytest.raises(StreamError, match="ended early"):
            engine.generate(PROMPT[::-1], GREEDY)
        put_back()
        assert engine.generate(PROMPT, GREEDY).token_ids == model.says[0]
        if way == "device":
            with monkeypatch.context() as patched:
                patched.setattr(torch.cuda.Event, "synchronize", _failing)
                with pytest.raises(StreamError, match="copying layer"):
                    engine.generate(PROMPT[::-1], GREEDY)
            assert engine.generate(PROMPT, GREEDY).token_ids == model.says[0]
        for after in (1, 2):
            stream = engine.stream(PROMPT, SAMPLED)
            for _ in range(after):
                next(stream)
            stream.close()
        assert engine.generate(PROMPT, SAMPLED).token_ids == model.says[1]


def _failing(event: torch.cuda.Event) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def load(folder: Path, vram: int, memory: int, way: str = "auto") -> Engine:
    settings: dict[str, Any] = {"draft": "none", "dtype": "float32", "context": 32, "device": "cuda"}
    return offspec.load(str(folder), vram=vram, memory=memory, experts=way, **settings)


def needed(name: str, *given: Any) -> int:
    with pytest.raises(CapacityError, match=name) as caught:
        load(*given)
    return caught.value.needed


def test_memory_decides(tmp_path: Path) -> None:
    """VRAM keeps as many experts as fit with everything else, and so does RAM after it."""
    folder = write_experts(tmp_path / "model", "mixtral", **MOST)
    least = needed("`vram`", folder, RUNTIME + SLACK, PLENTY)
    ram = needed("`memory`", folder, 3_000_000_000, 10_000_000) + 5_000_000
    assert least > RUNTIME + SLACK
    said, seen = set[tuple[int, ...]](), list[tuple[int, int]]()
    for vram, memory in ((least, ram), (least + 10_000_000, PLENTY), (PLENTY // 2, PLENTY)):
        with load(folder, vram, memory) as engine:
            said.add(engine.generate(PROMPT, sampling(0.0, 3)).token_ids)
            seen.append((engine.placement["expert_slots"], engine.placement["host_expert_slots"]))
    assert len(said) == 1
    (near, behind), (more, every), fits = seen
    assert 8 <= near < more < 24 and 8 <= behind < every == 24 and fits == (0, 0)


def test_a_requested_placement_is_used_with_any_memory(tmp_path: Path) -> None:
    """A GPU with room for all experts gets none, either, and much less VRAM is enough."""
    folder = write_experts(tmp_path / "model", "mixtral", **MOST)
    least = needed("`vram`", folder, RUNTIME + SLACK, PLENTY, "cpu")
    assert least < needed("`vram`", folder, RUNTIME + SLACK, PLENTY, "gpu")
    ram = needed(r"`memory` .*experts in RAM", folder, least, 10_000_000, "cpu")
    said = set[tuple[int, ...]]()
    for way, vram, memory in (("cpu", least, ram), ("cpu", PLENTY, PLENTY), ("auto", PLENTY, PLENTY)):
        with load(folder, vram, memory, way) as engine:
            placement, result = engine.placement, engine.generate(PROMPT, sampling(0.0, 3))
            said.add(result.token_ids)
            slots = placement["host_expert_slots"]
            assert result.cpu_experts == placement["cpu_experts"] == (way == "cpu")
            assert placement["expert_slots"] == 0
            assert 8 <= slots < 24 if memory < PLENTY else slots == 24 * (way == "cpu")
    assert len(said) == 1


def test_a_notice_reports_a_setting_without_effect(tmp_path: Path) -> None:
    dense, mixture = write_model(tmp_path / "dense"), write_experts(tmp_path / "mixture", "mixtral")
    settings = {"draft": "none", "dtype": "float32", "context": 64, "budget": 1}
    for model, device, way, why in (
        (dense, "cuda", "cpu", "this model has no experts"),
        (mixture, "cpu", "auto", ""),
    ):
        told = list[str]()
        notify = lambda event, told=told: told.append(getattr(event, "text", ""))  # noqa: E731
        offspec.load(str(model), device=device, experts=way, notify=notify, **settings).close()
        found = [text for text in told if "`experts`" in text]
        assert len(found) == bool(why) and all(why in text for text in found)
    with pytest.raises(RequestError, match="omit `experts`, which needs a GPU"):
        offspec.load(str(mixture), device="cpu", experts="cpu")
    with pytest.raises(RequestError, match="both layers and experts: omit `cpu_layers` or `experts`"):
        offspec.load(str(mixture), device="cuda", experts="cpu", cpu_layers=1)
    with pytest.raises(RequestError, match="'auto', 'gpu' or 'cpu'"):
        offspec.load(str(mixture), experts="tpu")
