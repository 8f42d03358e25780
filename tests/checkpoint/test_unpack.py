"""Unpacked GGUF files: they give the original model in any supported architecture, or nothing."""

import os
import shutil
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from offspec.checkpoint import Checkpoint
from offspec.checkpoint.gguf import dequantize
from offspec.checkpoint.gguf.architectures import ARCHITECTURES
from offspec.checkpoint.safetensors_writer import ALIGNMENT
from offspec.checkpoint.tensors import TensorInfo, stored_tensors
from offspec.core.errors import HeaderError, MissingTensorError, UnsupportedModelError
from offspec.core.events import LoadProgress, Notice
from tests.support.gguf_families import FAMILIES, tiny_model
from tests.support.gguf_files import UnpackEnvironment, write_gguf
from tests.support.gguf_hybrids import HYBRIDS


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(4, 40)[None]).logits
    return found


def loaded(checkpoint: Checkpoint) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.float32)
    model.eval()
    return model


def stored(checkpoint: Checkpoint) -> list[TensorInfo]:
    return [info for weight in checkpoint.tensors.values() for info in stored_tensors(weight)]


def test_every_architecture_is_tested() -> None:
    assert {name.split()[0] for name in (*FAMILIES, *HYBRIDS)} == set(ARCHITECTURES)


@pytest.mark.parametrize("family", FAMILIES)
def test_unpacked_model_is_equal(
    bench: UnpackEnvironment, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dequantize, "PIECE", 200)  # so that these small tensors have several pieces
    model = tiny_model(family)
    write_gguf(bench.file, model, family)
    checkpoint = bench.open(unpack=True)
    again = loaded(checkpoint)
    state = model.state_dict()
    assert again.state_dict().keys() == state.keys()
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    assert torch.equal(logits(again), logits(model))
    expected = set(state) - ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
    assert set(checkpoint.tensors) == expected
    assert {info.dtype for info in stored(checkpoint)} == {"BF16"}
    assert checkpoint.config["dtype"] == "bfloat16"
    assert checkpoint.config["architectures"] == [type(model).__name__]


def test_files_are_laid_out_for_streaming_once_with_progress(
    bench: UnpackEnvironment, llama: PreTrainedModel
) -> None:
    write_gguf(bench.file, llama, "llama")
    checkpoint = bench.open(unpack=True)
    for name, info in checkpoint.tensors.items():
        layer = f"layer-{int(name.split('.')[2]):04}" if ".layers." in name else "rest"
        assert info.file.name == f"model-{layer}.safetensors"
    for file in {info.file for info in stored(checkpoint)}:
        assert min(info.offset for info in stored(checkpoint) if info.file == file) % ALIGNMENT == 0
    config = AutoConfig.from_pretrained(checkpoint.folder)
    assert config.dtype == torch.bfloat16
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 0)

    progress = [event for event in bench.events if isinstance(event, LoadProgress)]
    assert progress[0].done == 0
    assert progress[-1].done == progress[-1].total == checkpoint.nbytes
    assert [event.done for event in progress] == sorted({event.done for event in progress})
    assert all((event.unit, event.stage) == ("bytes", "unpacking tiny.gguf") for event in progress)
    assert next(e for e in bench.events if isinstance(e, Notice)).text.startswith("unpacking tiny.gguf once")
    assert bench.open(unpack=True).fingerprint == checkpoint.fingerprint
    assert bench.events == []


def test_each_file_has_its_own_folder(bench: UnpackEnvironment, llama: PreTrainedModel) -> None:
    write_gguf(bench.file, llama, "llama")
    first = bench.open(unpack=True).folder
    moved = bench._replace(file=bench.file.with_name("moved") / "tiny.gguf")
    moved.file.parent.mkdir()
    shutil.copy2(bench.file, moved.file)
    assert moved.open(unpack=True).folder == first
    renamed = moved._replace(file=moved.file.rename(moved.file.with_name("renamed.gguf")))
    assert renamed.open(unpack=True).folder == first
    assert renamed.open().fingerprint == bench.open().fingerprint  # the model made of it is found as well
    os.utime(bench.file, ns=(1, 1))
    assert bench.open(unpack=True).folder != first


def test_damaged_cache_is_made_again(bench: UnpackEnvironment, llama: PreTrainedModel) -> None:
    write_gguf(bench.file, llama, "llama")
    checkpoint = bench.open(unpack=True)
    shard = checkpoint.folder / "model-layer-0001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    again = bench.open(unpack=True)
    assert "damaged" in str(bench.events[0])
    assert again.tensors.keys() == checkpoint.tensors.keys()
    assert bench.cached_names() == [checkpoint.folder.name]


@pytest.mark.parametrize("kind", ["Q4_1", "F16"])
def test_quantized_values_are_rounded_once(
    bench: UnpackEnvironment, llama: PreTrainedModel, kind: str
) -> None:
    number = gguf.GGMLQuantizationType[kind]
    write_gguf(bench.file, llama, "llama", kind=number)
    again = loaded(bench.open(unpack=True)).state_dict()
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(bench.file).tensors}
    down = reader["blk.0.ffn_down.weight"]
    exact = torch.from_numpy(gguf.dequantize(down.data, number).astype(np.float32))
    assert torch.equal(again["model.layers.0.mlp.down_proj.weight"], exact.bfloat16().float())
    own = AutoModelForCausalLM.from_pretrained(
        bench.file.parent, gguf_file=bench.file.name, dtype=torch.float32
    )
    for name, tensor in own.state_dict().items():
        assert torch.equal(again[name], tensor.bfloat16().float()), name


def test_llama_3_position_factors_become_configuration(bench: UnpackEnvironment) -> None:
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
    }
    model = tiny_model("llama", rope_parameters=rope, head_dim=64)
    plain = 500_000.0 ** -(torch.arange(0, 64, 2).float() / 64)
    factors = (plain / model.model.rotary_emb.inv_freq).numpy()
    assert factors.max() == pytest.approx(8) and factors.min() == pytest.approx(1)
    write_gguf(bench.file, model, "llama", tensors={"rope_freqs.weight": factors})
    checkpoint = bench.open(unpack=True)
    assert checkpoint.config["rope_parameters"] == rope
    assert torch.equal(logits(loaded(checkpoint)), logits(model))
    write_gguf(bench.file, model, "llama", tensors={"rope_freqs.weight": factors**2})
    with pytest.raises(UnsupportedModelError, match="not Llama 3's"):
        bench.open(unpack=True)


PLAIN, LINEAR = {"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("rope", "keys"),
    [
        (LINEAR, {"scaling.type": "linear", "scaling.factor": 4.0}),
        (YARN, {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 32}),
        (LINEAR, {"scaling.factor": 4.0}),
        (PLAIN, {"scaling.type": "none", "scaling.factor": 4.0}),
        (PLAIN, {"scaling.factor": 0.0}),
        (LINEAR, {"scale_linear": 4.0}),  # the first spelling
        (LINEAR, {"scale_linear": 2.0, "scaling.factor": 4.0}),
    ],
)
def test_scaled_positions(bench: UnpackEnvironment, rope: dict[str, Any], keys: dict[str, Any]) -> None:
    model = tiny_model("qwen2", rope_parameters={**rope, "rope_theta": 10_000.0})
    write_gguf(bench.file, model, "qwen2", keys={f"qwen2.rope.{key}": value for key, value in keys.items()})
    assert torch.equal(logits(loaded(bench.open(unpack=True))), logits(model))


def test_gemma_3_scales_only_its_global_layers(bench: UnpackEnvironment) -> None:
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0}
    local = {"rope_type": "default", "rope_theta": 10_000.0}
    model = tiny_model("gemma3", rope_parameters={"full_attention": full, "sliding_attention": local})
    scaling = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    write_gguf(bench.file, model, "gemma3", keys=scaling)
    assert torch.equal(logits(loaded(bench.open(unpack=True))), logits(model))


@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_phi_3_has_factors_for_short_and_long_texts(bench: UnpackEnvironment, partial: float) -> None:
    rotated = int(16 * partial)
    short, long = np.linspace(1, 2, rotated // 2), np.linspace(1.5, 9, rotated // 2)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": short.tolist(),
        "long_factor": long.tolist(),
        "original_max_position_embeddings": 24,
        "partial_rotary_factor": partial,
    }
    model = tiny_model("phi3", rope_parameters=rope, original_max_position_embeddings=24)
    keys = {
        "phi3.rope.dimension_count": rotated,
        "phi3.rope.scaling.original_context_length": 24,
        "phi3.rope.scaling.attn_factor": float(np.sqrt(1 + np.log(128 / 24) / np.log(24))),
    }
    tables = {f"rope_factors_{name}.weight": table for name, table in (("short", short), ("long", long))}
    tables = {name: table.astype(np.float32) for name, table in tables.items()}
    write_gguf(bench.file, model, "phi3", keys=keys, tensors=tables)
    for unpack in (True, False):
        config = AutoConfig.from_pretrained(bench.open(unpack=unpack).folder)
        again = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        again.load_state_dict(model.state_dict())
        for ids in (torch.arange(4, 24)[None], torch.arange(4, 40)[None]):
            with torch.no_grad():
                assert torch.allclose(again(ids).logits, model(ids).logits, atol=1e-5)
    write_gguf(bench.file, model, "phi3", keys=keys, tensors=tables, without=("rope_factors_long.weight",))
    with pytest.raises(MissingTensorError, match="rope_factors_long"):
        bench.open()
    tables["rope_factors_short.weight"] = np.ones(3, np.float32)
    write_gguf(bench.file, model, "phi3", keys=keys, tensors=tables)
    with pytest.raises(HeaderError, match="3 factors"):
        bench.open()
