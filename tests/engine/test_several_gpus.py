"""Layers divided among two GPUs: the same tokens as on one, each GPU with rings of its own."""

from pathlib import Path

import pytest
import torch

import offspec
from offspec import Notice
from offspec.model.devices import RUNTIME, SLACK
from offspec_planners.placement import Placement, Tier
from tests.support.answers import PROMPT, TargetAndDrafts, sampling
from tests.support.tiny_models import reference, tiny_engine, write_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif("torch.cuda.device_count() < 2", reason="one CUDA device")]
PARAMS = sampling(0.0, 12)
TWO = (torch.device("cuda", 0), torch.device("cuda", 1))
_TIERS = {"v": Tier.DEVICE, "c": Tier.CPU, "h": Tier.HOST, "d": Tier.DISK}


@pytest.mark.parametrize(
    ("tiers", "gpus", "head"), [("vhdc", (1, 0, 1, 0), Tier.DISK), ("hhhv", (1, 1, 0, 0), Tier.HOST)]
)
def test_any_layer_on_either(tiers: str, gpus: tuple[int, ...], head: Tier, trio: TargetAndDrafts) -> None:
    model = trio.target
    placement = Placement(tuple(_TIERS[tier] for tier in tiers), 2, 2, head, gpus)
    with tiny_engine(model, model, placement=placement, device=TWO[0], more_devices=TWO[1:]) as engine:
        assert list(engine.generate(PROMPT, PARAMS).token_ids) == reference(model, PROMPT, 12)
        result = engine.generate(PROMPT[:6], PARAMS)
        assert list(result.token_ids) == reference(model, PROMPT[:6], 12), "rewound on both"
        rows = engine._assembly.target.tree_model.cache.rows
        places = ["cpu" if tier == "c" else f"cuda:{gpu}" for tier, gpu in zip(tiers, gpus, strict=True)]
        assert [str(row.stores[0].device) for row in rows] == places, "keys lie where they are attended"
        memory = {store.untyped_storage().data_ptr() for row in rows for store in row.stores}
        assert len(memory) == len(set(places)), "in one block on each device"


@pytest.mark.exhaustive
def test_limits_of_each_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each GPU has memory for part of the model; a notice reports GPUs that may round differently."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (8, 6 + 3 * gpu.index))
    said = list[str]()

    def notify(event: object) -> None:
        said.extend([event.text] if isinstance(event, Notice) else [])

    model = write_model(tmp_path / "model", hidden_size=256, intermediate_size=2048, num_hidden_layers=12)
    vram = RUNTIME + SLACK + 50_000_000
    settings = {"dtype": "float32", "vram": vram, "budget": 1, "draft": "none", "context": 128}
    with offspec.load(str(model), device="all", notify=notify, **settings) as engine:
        first, second = engine.placement["gpus"]
        assert first and second and first + second == 12
        assert list(engine.generate(PROMPT, PARAMS).token_ids) == reference(model, PROMPT, 12)
        for device in TWO:
            assert 0 < torch.cuda.max_memory_reserved(device) <= vram - RUNTIME
    assert sum("different generations" in text for text in said) == 1
