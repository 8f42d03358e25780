"""GGUF files of models with recurrent layers: reading them gives the original model."""

from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from offspec.checkpoint.gguf import dequantize
from offspec.core.errors import HeaderError, UnsupportedModelError
from tests.support.exhaustive import sampled_params
from tests.support.gguf_families import tiny_model
from tests.support.gguf_files import UnpackEnvironment, write_gguf
from tests.support.gguf_hybrids import HYBRIDS, module_tensors, with_mtp
from tests.support.gguf_values import load_float32, values

KIND: Any = gguf.GGMLQuantizationType
EXPERTS = ("granitehybrid experts", "jamba", "lfm2moe", "qwen35moe", "qwen3next")
DENSE = [family for family in HYBRIDS if family not in EXPERTS]


def run(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.arange(4, 40)[None]).logits
    return logits


@pytest.mark.parametrize("family", sampled_params([*EXPERTS, "qwen35", "mamba2", "nemotron_h"], *EXPERTS))
def test_unpacked_model_is_equal(
    bench: UnpackEnvironment, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dequantize, "PIECE", 200)
    model = tiny_model(family)
    write_gguf(bench.file, model, family)
    checkpoint = bench.open(unpack=True)
    again = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.float32).eval()
    state = model.state_dict()
    assert again.state_dict().keys() == state.keys()
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    assert torch.equal(run(again), run(model))


@pytest.mark.parametrize("family", DENSE)
def test_streamed_model_is_equal(bench: UnpackEnvironment, family: str) -> None:
    """Floats are unchanged, except for the rounding of values that were exponentiated."""
    model = tiny_model(family)
    write_gguf(bench.file, model, family)
    checkpoint = bench.open()
    again, state = load_float32(checkpoint), model.state_dict()
    for name, tensor in again.state_dict().items():
        torch.testing.assert_close(tensor, state[name], rtol=0, atol=1e-6 * name.endswith("A_log"))
    torch.testing.assert_close(run(again), run(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen35", "granitehybrid", "nemotron_h"])
def test_quantized_streaming_equals_unpacking(bench: UnpackEnvironment, family: str) -> None:
    write_gguf(bench.file, tiny_model(family), family, kind=KIND.Q4_0, mixed={"attn_gate": KIND.Q8_0})
    streamed, unpacked = (load_float32(bench.open(unpack=unpack)).state_dict() for unpack in (False, True))
    for name, tensor in unpacked.items():
        assert torch.equal(tensor, streamed[name].bfloat16().float()), name


@pytest.mark.parametrize("family", ["qwen35", "lfm2"])
def test_model_equals_the_one_loaded_by_transformers(bench: UnpackEnvironment, family: str) -> None:
    write_gguf(bench.file, tiny_model(family), family, kind=KIND.Q8_0)
    checkpoint = bench.open()
    own = AutoModelForCausalLM.from_pretrained(
        bench.file.parent,
        gguf_file=bench.file.name,
        dtype=torch.float32,
        config=AutoConfig.from_pretrained(checkpoint.folder),
    ).eval()
    mine = load_float32(checkpoint)
    state = mine.state_dict()
    for name, tensor in own.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-6 * name.endswith("A_log"))
    torch.testing.assert_close(run(mine), run(own), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen35", "qwen35moe"])
def test_mtp_module_is_named_as_in_safetensors(bench: UnpackEnvironment, family: str) -> None:
    one = tiny_model(family, num_hidden_layers=1, layer_types=["full_attention"])
    tensors, expected = module_tensors(4, one, family)
    model = tiny_model(family)
    write_gguf(bench.file, model, family, keys=with_mtp(family), tensors=tensors)
    checkpoint = bench.open()
    assert checkpoint.config["num_hidden_layers"] == 4
    found = {name: weight for name, weight in checkpoint.tensors.items() if name.startswith("mtp.")}
    assert found.keys() == expected.keys()
    for name, data in expected.items():
        assert torch.equal(values(found[name]), torch.from_numpy(data)), name
    assert set(checkpoint.tensors) == set(model.state_dict()) | set(expected)


@pytest.mark.parametrize(
    ("family", "keys", "error", "why"),
    [
        ("granitehybrid", {"rope.scaling.finetuned": True}, UnsupportedModelError, "holds a Bamba"),
        ("mamba", {"ssm.dt_b_c_rms": True}, UnsupportedModelError, "holds a Falcon Mamba"),
        ("qwen35", {"ssm.group_count": 4}, HeaderError, "6 value heads cannot share 4 key heads"),
        ("qwen35", {"ssm.inner_size": 97}, HeaderError, "97 is not a multiple of ssm.time_step_rank of 6"),
        ("qwen35", {"ssm.state_size": 0}, HeaderError, "invalid qwen35.ssm.state_size: '0'"),
        ("qwen35", {"ssm.state_size": None}, HeaderError, "invalid qwen35.ssm.state_size: 'None'"),
        ("qwen35", {"nextn_predict_layers": -1}, HeaderError, "invalid qwen35.nextn_predict_layers: '-1'"),
        ("granitehybrid", {"logit_scale": "4"}, HeaderError, "invalid granitehybrid.logit_scale: '4'"),
        ("mamba2", {"ssm.state_size": 32}, HeaderError, r"0.ssm_conv1d.* is \[.* but the model expects \["),
    ],
)
def test_inconsistent_file_is_refused(
    bench: UnpackEnvironment, family: str, keys: dict[str, Any], error: type[Exception], why: str
) -> None:
    given = {f"{family}.{key}": value for key, value in keys.items()}
    write_gguf(bench.file, tiny_model(family), family, keys=given)
    for unpack in (False, True):
        with pytest.raises(error, match=why) as caught:
            bench.open(unpack=unpack)
        assert "\n" not in str(caught.value)
        assert bench.cached_names() == []


def test_unevenly_spaced_layers(bench: UnpackEnvironment) -> None:
    extra = {"blk.0.attn_k.weight": np.zeros((32, 64), np.float32)}
    write_gguf(bench.file, tiny_model("jamba"), "jamba", tensors=extra)
    with pytest.raises(UnsupportedModelError, match=r"attention in layers \[0, 1, 3\], which are not evenly"):
        bench.open()
