"""gpt-oss with experts in MXFP4, as published, compared with the same values unpacked."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from offspec.checkpoint import open_checkpoint
from offspec.checkpoint.tensors import PackedInfo
from offspec.core.errors import HeaderError, MissingTensorError
from offspec.model.attention import TreeContext
from offspec_planners.placement import Placement
from tests.support.answers import generate_tokens, sampling
from tests.support.expert_models import on_demand_placement
from tests.support.mxfp4_models import write_both
from tests.support.quantized_files import change, refused
from tests.support.tiny_models import nothing, open_model, tiny_engine

IDS = torch.tensor([5, 9, 17, 33, 64, 20, 21, 22, 9, 41, 3, 90])
LAYERS = 3
PARAMS = sampling(1.0)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_both(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected(both: tuple[Path, Path]) -> tuple[int, ...]:
    (found,) = generate_tokens(both[0], PARAMS, prompt=IDS.tolist())
    assert len(set(found)) > 4
    return found


def test_every_expert_stays_in_its_codes(both: tuple[Path, Path]) -> None:
    tensors = open_checkpoint(str(both[1])).tensors
    packed = {name for name, weight in tensors.items() if isinstance(weight, PackedInfo)}
    experts = "model.layers.{}.mlp.experts.{}"
    assert packed == {
        experts.format(i, part) for i in range(LAYERS) for part in ("gate_up_proj", "down_proj")
    }
    assert tensors[experts.format(0, "gate_up_proj")].shape == (4, 64, 192)


@pytest.mark.parametrize("resident", [(), (0, 1, 2)])
def test_the_logits_of_transformers(both: tuple[Path, Path], resident: tuple[int, ...]) -> None:
    dense, packed = both
    own: Any = AutoModelForCausalLM.from_pretrained(
        dense, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    model = open_model(packed)
    model.load(Placement.in_memory(LAYERS, resident, 2), len(IDS), nothing)
    try:
        with torch.no_grad():
            expected = own(IDS[None]).logits[0]
            hidden = model.tree_model.hidden(IDS, TreeContext.chain(len(IDS), torch.device("cpu")))
            logits = model.tree_model.logits(hidden)
    finally:
        model.close()
    assert expected.std() > 0.5
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("draft", "budget", "resident", "device"),
    [
        ("none", 1, (), "cpu"),
        ("itself", 32, (0,), "cpu"),
        pytest.param("auto", 7, (), "cuda", marks=pytest.mark.gpu),
    ],
    indirect=["device"],
)
def test_tokens_do_not_depend_on_drafts_budgets_or_what_is_resident(
    both: tuple[Path, Path], expected: tuple[int, ...], draft: str, budget: int, resident: tuple[int, ...],
    device: torch.device,
) -> None:  # fmt: skip
    guesses = both[1] if draft == "itself" else draft
    given = {"budget": budget, "resident": resident, "device": device}
    assert generate_tokens(both[1], PARAMS, draft=guesses, prompt=IDS.tolist(), **given) == [expected]


@pytest.mark.parametrize(("slots", "draft"), [(1, "none"), (5, "auto"), (12, "itself")])
def test_experts_by_need(both: tuple[Path, Path], expected: tuple[int, ...], slots: int, draft: str) -> None:
    """An expert unpacked alone has the same bits as when all are unpacked."""
    packed, budget = both[1], 1 if draft == "none" else 7
    guesses = packed if draft == "itself" else draft
    with tiny_engine(packed, guesses, budget=budget, placement=on_demand_placement(LAYERS, slots)) as engine:
        assert engine.generate(IDS.tolist(), PARAMS).token_ids == expected
        store = engine._assembly.target.store
        assert store is not None and store.stats.requested > 0
        assert slots == 12 or store.stats.hits < store.stats.requested, "twelve are all of them"


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.down_proj_scales"
    _, packed = write_both(tmp_path)
    assert "down_proj" in refused(change(packed, name, lambda scales: scales[:, :-1].clone()), HeaderError)
    assert name in refused(change(packed, name, lambda scales: None), MissingTensorError)


def test_codes_without_a_quantization_config(tmp_path: Path) -> None:
    """Without a quantization_config, the tensors would be reported as missing."""
    _, packed = write_both(tmp_path)
    config = json.loads((packed / "config.json").read_text())
    del config["quantization_config"]
    (packed / "config.json").write_text(json.dumps(config))
    message = refused(packed, HeaderError)
    assert "_scales" in message and "quantization_config" in message
