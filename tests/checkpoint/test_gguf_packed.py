"""GGUF files streamed in place: weights equal those that transformers loads, and nothing is copied."""

import json
import os
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from offspec.checkpoint import open_checkpoint
from offspec.checkpoint.gguf.header import read_gguf
from offspec.checkpoint.tensors import PackedInfo, TensorInfo, can_slice, slice_of, stored_tensors
from offspec.core.errors import CheckpointError, HeaderError, TruncatedError, UnsupportedModelError
from offspec.core.events import Notice
from tests.support.exhaustive import sampled_params
from tests.support.gguf_families import FAMILIES, tiny_model
from tests.support.gguf_files import UnpackEnvironment, write_gguf
from tests.support.gguf_values import load_float32, values

KIND: Any = gguf.GGMLQuantizationType
EXPERTS = ("qwen2moe", "qwen3moe", "llama with experts", "gpt-oss")
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}


def run(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.arange(4, 40)[None]).logits
    return logits


def transformers_model(bench: UnpackEnvironment, config: Any = None) -> PreTrainedModel:
    """Return the float32 model as transformers loads the file. config: fields that transformers ignores."""
    given = {} if config is None else {"config": config}
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        bench.file.parent, gguf_file=bench.file.name, dtype=torch.float32, **given
    )
    model.eval()
    return model


@pytest.mark.parametrize("family", [each for each in FAMILIES if each not in (*EXPERTS, "mistral3")])
def test_every_architecture_equals_transformers(bench: UnpackEnvironment, family: str) -> None:
    write_gguf(bench.file, tiny_model(family), family, kind=KIND.Q4_0, mixed={"token_embd": KIND.Q8_0})
    checkpoint = bench.open()
    mine, own = (
        load_float32(checkpoint),
        transformers_model(bench, AutoConfig.from_pretrained(checkpoint.folder)),
    )
    state = mine.state_dict()
    for name, tensor in own.state_dict().items():
        assert torch.equal(state[name], tensor), name
    assert (run(mine) - run(own)).abs().max() <= 1e-4


@pytest.mark.parametrize("kind", ["ministral3", "llama"])
def test_ministral_without_transformers(bench: UnpackEnvironment, llama: PreTrainedModel, kind: str) -> None:
    model = llama if kind == "llama" else tiny_model("mistral3")
    write_gguf(bench.file, model, "mistral3")
    checkpoint = bench.open()
    assert checkpoint.config["model_type"] == kind
    query = checkpoint.tensors["model.layers.0.self_attn.q_proj.weight"]
    mine = load_float32(checkpoint)
    assert isinstance(query, PackedInfo)
    assert torch.equal(mine.state_dict()[query.name], model.state_dict()[query.name])
    assert torch.equal(run(mine), run(model))


@pytest.mark.parametrize(
    "kind", sampled_params(["F16", "BF16", "Q5_1", "Q6_K", "Q3_K", "IQ4_XS"], "F16", "BF16", "Q5_1", "Q6_K")
)
def test_every_type_equals_transformers(bench: UnpackEnvironment, kind: str) -> None:
    model = tiny_model("llama", **WIDE)
    write_gguf(bench.file, model, "llama", kind=KIND[kind], mixed={"attn_v": KIND.Q8_0})
    checkpoint = bench.open()
    found = {weight.format.name for weight in checkpoint.tensors.values() if isinstance(weight, PackedInfo)}
    assert found == {kind, "Q8_0"}
    mine, own = load_float32(checkpoint), transformers_model(bench)
    state = mine.state_dict()
    for name, tensor in own.state_dict().items():
        assert torch.equal(state[name], tensor), name
    assert (run(mine) - run(own)).abs().max() <= 1e-4


def test_only_text_files_are_written_and_weights_stay_in_place(
    bench: UnpackEnvironment, llama: PreTrainedModel
) -> None:
    write_gguf(bench.file, llama, "llama", kind=KIND.Q4_0, mixed={"ffn_up": KIND.BF16})
    checkpoint = bench.open()
    assert {file.suffix for file in checkpoint.folder.iterdir()} == {".json", ".jinja"}
    tensors = read_gguf(bench.file).tensors
    assert checkpoint.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    for weight in checkpoint.tensors.values():
        (info,) = stored_tensors(weight)
        assert info.file == bench.file
    down = checkpoint.tensors["model.layers.1.mlp.down_proj.weight"]
    assert isinstance(down, PackedInfo)
    (part,) = stored_tensors(down)
    assert (part.name, part.dtype, part.shape) == ("blk.1.ffn_down.weight", "U8", (64, 96 // 32 * 18))
    assert part.offset == tensors[part.name].offset
    up, norm = (checkpoint.tensors[f"model.{name}.weight"] for name in ("layers.1.mlp.up_proj", "norm"))
    assert isinstance(up, TensorInfo) and (up.dtype, up.shape) == ("BF16", (96, 64))
    assert isinstance(norm, TensorInfo) and norm.dtype == "F32"
    assert "dtype" in checkpoint.config and "quantization_config" not in checkpoint.config


def test_biases_of_queries_are_reordered(bench: UnpackEnvironment) -> None:
    model = tiny_model("llama", attention_bias=True, mlp_bias=True)
    write_gguf(bench.file, model, "llama", kind=KIND.F16)
    checkpoint = bench.open()
    assert checkpoint.config["attention_bias"] and checkpoint.config["mlp_bias"]
    found = load_float32(checkpoint).state_dict()
    biases = {name: tensor for name, tensor in model.state_dict().items() if name.endswith("bias")}
    assert len(biases) == 3 * 7 and all(torch.equal(found[name], tensor) for name, tensor in biases.items())


def test_opening_again_sends_no_notice(bench: UnpackEnvironment, llama: PreTrainedModel) -> None:
    write_gguf(bench.file, llama, "llama", kind=KIND.Q8_0)
    first = bench.open()
    fingerprint = first.fingerprint
    again = bench.open()
    assert bench.events == []
    assert (again.folder, again.fingerprint) == (first.folder, fingerprint)
    assert dict(again.tensors) == dict(first.tensors)
    os.utime(bench.file, ns=(1, 1))
    assert bench.open().fingerprint != fingerprint


@pytest.mark.parametrize("text", ["", "{}", '{"model_type": "llama", "num_hidden_layers": 3}'])
def test_damaged_description_is_made_again(
    bench: UnpackEnvironment, llama: PreTrainedModel, text: str
) -> None:
    write_gguf(bench.file, llama, "llama", kind=KIND.Q8_0)
    checkpoint = bench.open()
    (checkpoint.folder / "config.json").write_text(text)
    again = bench.open()
    assert "was damaged and is rebuilt" in str(bench.events[0])
    assert dict(again.tensors) == dict(checkpoint.tensors)
    assert json.loads((again.folder / "config.json").read_text()) == again.config == checkpoint.config
    assert bench.cached_names() == [checkpoint.folder.name]


@pytest.mark.parametrize(
    ("family", "kind"),
    [("qwen2moe", "Q8_0"), ("qwen3moe", "MXFP4"), ("llama with experts", "Q4_0"), ("gpt-oss", "MXFP4")],
)
def test_fused_experts_stay_in_place(bench: UnpackEnvironment, family: str, kind: str) -> None:
    """Values equal those of the gguf package, also for a single expert."""
    model = tiny_model(family, **({"shared_expert_intermediate_size": 64} if family == "qwen2moe" else {}))
    write_gguf(bench.file, model, family, kind=KIND.Q8_0, mixed={"_exps": KIND[kind]})
    checkpoint = bench.open()
    assert checkpoint.folder.parent.name == "described"
    assert checkpoint.config["model_type"] == model.config.model_type
    mine, own = load_float32(checkpoint), gguf_state(bench, model, family)
    for name, tensor in mine.state_dict().items():
        assert torch.equal(tensor, own[name]), name
    model.load_state_dict(own)
    assert torch.equal(run(mine), run(model))
    experts = [weight for name, weight in checkpoint.tensors.items() if name.endswith("_proj")]
    assert len(experts) == 2 * 3
    for weight in experts:
        assert {info.file for info in stored_tensors(weight)} == {bench.file} and can_slice(weight)
        for expert in (0, 3):
            assert torch.equal(values(slice_of(weight, expert)), own[weight.name][expert : expert + 1])


def gguf_state(bench: UnpackEnvironment, model: PreTrainedModel, family: str) -> dict[str, torch.Tensor]:
    """Return the state dict of the file's values, as a float32 file has them."""
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(bench.file).tensors}
    exact = {
        name: gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        for name, tensor in found.items()
    }
    write_gguf(bench.file.with_name("exact.gguf"), model, family, tensors=exact)
    again = open_checkpoint(str(bench.file.with_name("exact.gguf")), unpack=False, cache_dir=bench.cache)
    return load_float32(again).state_dict()


@pytest.mark.parametrize(("chosen", "count"), [(0, 4), (5, 4), ("2", 4), (2, "4"), (2, 1 << 30)])
def test_experts_that_cannot_be_sliced(bench: UnpackEnvironment, chosen: object, count: object) -> None:
    keys = {"llama.expert_used_count": chosen, "llama.expert_count": count}
    write_gguf(bench.file, tiny_model("llama with experts"), "llama with experts", keys=keys)
    with pytest.raises(HeaderError, match=r"invalid expert counts: "):
        bench.open()


def test_type_that_cannot_be_streamed_is_unpacked(bench: UnpackEnvironment) -> None:
    write_gguf(bench.file, tiny_model("llama", **WIDE), "llama", kind=KIND.IQ2_XXS)
    checkpoint = bench.open()
    notice = next(event for event in bench.events if isinstance(event, Notice))
    assert "unpacking tiny.gguf once" in notice.text and "IQ2_XXS" in notice.text
    assert checkpoint.folder.parent.name == "unpacked"


def test_quantized_norm_is_refused(bench: UnpackEnvironment) -> None:
    """Gemma's norms lose the 1 that the file adds, which is impossible for blocks."""
    model = tiny_model("gemma2")
    write_gguf(bench.file, model, "gemma2")
    norm = {"output_norm.weight": np.ones((1, 64), np.float32)}
    write_gguf(bench.file, model, "gemma2", kind=KIND.Q8_0, tensors=norm)
    why = r"'output_norm\.weight' as Q8_0, which is not supported"
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match=why):
            bench.open()
        assert (bench.events, bench.cached_names()) == ([], [])


def test_truncation_of_an_opened_file_is_detected(bench: UnpackEnvironment, llama: PreTrainedModel) -> None:
    write_gguf(bench.file, llama, "llama", kind=KIND.Q8_0)
    bench.open()
    os.truncate(bench.file, bench.file.stat().st_size - 100)
    with pytest.raises(TruncatedError, match="download it again"):
        bench.open()


@pytest.mark.parametrize(
    ("name", "other"),
    [("blk.0.ffn_up.weight", "Q8_0"), ("blk.0.ffn_up.weight", "Q4_0"), ("output.weight", "Q4_0")],
)
def test_swapped_tensor_types_are_detected(
    bench: UnpackEnvironment, llama: PreTrainedModel, name: str, other: str
) -> None:
    write_gguf(bench.file, llama, "llama", kind=KIND.Q5_1)
    data = bytearray(bench.file.read_bytes())
    start = data.index(len(name).to_bytes(8, "little") + name.encode()) + 8 + len(name)
    place = start + 4 + 2 * 8  # after the number of dimensions and two sizes
    assert data[place] == KIND.Q5_1
    data[place] = KIND[other]
    bench.file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"overlap|unused bytes|cut short") as caught:
        bench.open()
    assert isinstance(caught.value, HeaderError | TruncatedError)
    assert bench.cached_names() == []
