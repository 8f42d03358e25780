"""gpt-oss with its experts in MXFP4, as it is published, against the same values stored whole."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from offspec import SamplingParams
from offspec.checkpoint import open_checkpoint
from offspec.checkpoint.tensors import PackedInfo
from offspec.core.errors import HeaderError, MissingTensorError
from offspec.model.attention import TreeContext
from offspec_planners.placement import Placement
from tests.support import packers
from tests.support.expert_models import by_need
from tests.support.products import some
from tests.support.quantised_files import change, refused
from tests.support.tiny_models import nothing, open_model, tiny_engine, write_model

IDS = torch.tensor([5, 9, 17, 33, 64, 20, 21, 22, 9, 41, 3, 90])
LAYERS = 3
# As the config.json of openai/gpt-oss-20b has it.
SETTINGS = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}


def write_both(folder: Path) -> tuple[Path, Path]:
    """A model with random codes, and one of the values that they stand for."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    dense = write_model(folder / "dense", "gpt_oss", tie_word_embeddings=False, **sizes)
    packed = folder / "packed"
    values, stored = load_file(dense / "model.safetensors"), dict[str, torch.Tensor]()
    for name, tensor in values.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            made = packers.mxfp4((tensor.shape[0], tensor.shape[1], tensor.shape[2]))
            values[name] = made.values
            stored |= {f"{name}_{part}": codes for part, codes in made.tensors.items()}
        else:
            stored[name] = tensor
    packed.mkdir()
    for file in dense.iterdir():
        if file.suffix != ".safetensors":
            (packed / file.name).write_bytes(file.read_bytes())
    config = json.loads((dense / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": SETTINGS}))
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    save_file(values, dense / "model.safetensors", metadata={"format": "pt"})
    return dense, packed


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    torch.manual_seed(3)
    return write_both(tmp_path_factory.mktemp("models"))


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


@pytest.mark.parametrize("temperature", some([0.0, 1.0], 1.0))
def test_tokens_do_not_depend_on_drafts_budgets_or_what_is_resident(
    both: tuple[Path, Path], temperature: float, device: torch.device
) -> None:
    dense, packed = both
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=16, ignore_eos=True)
    with tiny_engine(dense, "none", budget=1) as engine:
        expected = engine.generate(IDS.tolist(), params).token_ids
    assert len(set(expected)) > 4
    for draft, budget, resident in (("none", 1, ()), ("auto", 7, ()), (packed, 32, (0,)), (dense, 8, ())):
        with tiny_engine(packed, draft, budget=budget, resident=resident, device=device) as engine:
            assert engine.generate(IDS.tolist(), params).token_ids == expected, draft


@pytest.mark.parametrize("slots", [1, 5])
def test_experts_by_need(both: tuple[Path, Path], slots: int) -> None:
    """Each is unpacked alone, to the bits that it has among all."""
    dense, packed = both
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=16, ignore_eos=True)
    with tiny_engine(dense, "none", budget=1) as engine:
        expected = engine.generate(IDS.tolist(), params).token_ids
    for draft, budget in (("none", 1), ("auto", 7)):
        with tiny_engine(packed, draft, budget=budget, placement=by_need(LAYERS, slots)) as engine:
            assert engine.generate(IDS.tolist(), params).token_ids == expected, draft
            store = engine._assembly.target.store
            assert store is not None and 0 <= store.stats.hits < store.stats.asked


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.down_proj_scales"
    _, packed = write_both(tmp_path)
    assert "down_proj" in refused(change(packed, name, lambda scales: scales[:, :-1].clone()), HeaderError)
    assert name in refused(change(packed, name, lambda scales: None), MissingTensorError)


def test_codes_that_nobody_explains(tmp_path: Path) -> None:
    """Without a quantization_config they would be said to be missing."""
    _, packed = write_both(tmp_path)
    config = json.loads((packed / "config.json").read_text())
    del config["quantization_config"]
    (packed / "config.json").write_text(json.dumps(config))
    message = refused(packed, HeaderError)
    assert "_scales" in message and "quantization_config" in message


@pytest.mark.parametrize("slots", [1, 4, 12])
def test_experts_that_are_read_when_asked_for_say_the_same(both: tuple[Path, Path], slots: int) -> None:
    dense, packed = both
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.7, seed=5)
    with tiny_engine(dense, "none", budget=1, resident=range(LAYERS), slots=0) as engine:
        expected = engine.generate(IDS.tolist(), params).token_ids
    with tiny_engine(packed, packed, budget=24, placement=by_need(LAYERS, slots)) as engine:
        assert engine.generate(IDS.tolist(), params).token_ids == expected
