"""Contents of packs."""

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import offspec
from offspec.checkpoint import open_checkpoint
from offspec.checkpoint.pack_manifest import MANIFEST
from offspec.checkpoint.tensors import PackedInfo, TensorInfo, stored_tensors
from offspec.core.config import PackFormat
from offspec.core.errors import CheckpointError, UnsupportedModelError
from offspec.model.attention import TreeContext
from offspec.model.probe.build import build_skeleton
from offspec.model.quantize.pack import files, pack_model
from offspec.model.weights import map_weights
from offspec_planners.placement import Placement
from tests.model.quantize.stage import FORMATS, LAYERS, SIZES, Bench, values
from tests.support.exhaustive import sampled_params
from tests.support.expert_models import on_demand_placement
from tests.support.tiny_models import VOCABULARY, nothing, open_model, write_config, write_model


@pytest.mark.parametrize("to", sampled_params(FORMATS, "int4-g64"))
def test_matrices_of_layers_are_quantized_and_others_are_kept(
    bench: Bench, to: PackFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any slab size."""
    pack = bench.pack(to)
    assert pack.files == LAYERS + 1 and pack.kept == 0
    assert pack.nbytes < pack.source_bytes
    before, after = load_file(bench.model / "model.safetensors"), open_checkpoint(str(bench.out)).tensors
    assert before.keys() == after.keys()
    rest = load_file(bench.out / "model-rest.safetensors")
    for name, tensor in before.items():
        assert tuple(tensor.shape) == after[name].shape
        if ".layers." in name and tensor.dim() == 2:
            error = (values(bench.out, name) - tensor).square().mean().sqrt() / tensor.square().mean().sqrt()
            assert error < (0.01 if to == "int8" else 0.15)
        else:
            assert not isinstance(after[name], PackedInfo)
            if ".layers." not in name:
                assert rest[name].dtype == torch.bfloat16 and torch.equal(rest[name], tensor.bfloat16())
    monkeypatch.setattr(files, "_MOST", 3 * 64)
    bench.pack(to, out=tmp_path / "small")
    assert bench.content() == bench.content(tmp_path / "small")


def test_a_pack_is_a_model_folder_with_a_file_for_each_layer(bench: Bench) -> None:
    """The data starts at a page boundary."""
    bench.pack()
    for name, weight in open_checkpoint(str(bench.out)).tensors.items():
        layer = name.split(".")[2] if ".layers." in name else ""
        wanted = f"model-layer-{int(layer):04}" if layer else "model-rest"
        assert weight.file.name == f"{wanted}.safetensors"
    starts = {file["start"] for file in json.loads((bench.out / MANIFEST).read_text())["files"].values()}
    assert all(start % 4096 == 0 for start in starts)
    names = {file.name for file in bench.out.iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= names
    config = json.loads((bench.out / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["quantization_config"] == {"quant_method": "offspec", "format": "nf4"}


@pytest.mark.parametrize("family", sampled_params(["mixtral", "qwen2_moe", "gpt_oss"], "gpt_oss"))
def test_experts_are_quantized_and_routers_are_not(tmp_path: Path, family: str) -> None:
    """Each expert is one extent."""
    sizes = {**SIZES, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    source = write_model(tmp_path / "moe", family, **sizes)
    pack_model(str(source), "int8", out=tmp_path / "pack")
    tensors = open_checkpoint(str(tmp_path / "pack")).tensors
    packed = {name for name, weight in tensors.items() if isinstance(weight, PackedInfo)}
    experts = {name for name in tensors if ".experts." in name and "bias" not in name}
    assert experts and experts <= packed
    assert not any("router" in name or ".gate." in name or "shared_expert_gate" in name for name in packed)
    stored = load_file(source / "model.safetensors")
    for name in experts:
        stack, _, expert = name.rpartition(".")
        original = stored[name] if name in stored else stored[stack][int(expert)]
        assert (values(tmp_path / "pack", name) - original).abs().max() < 0.02
    if family == "gpt_oss":  # a stack of experts, split in the next test
        return
    extents: dict[str, list[TensorInfo]] = {}
    for name in experts:
        extents.setdefault(name.rsplit(".", 2)[0], []).extend(stored_tensors(tensors[name]))
    assert len(extents) == LAYERS * 4
    for parts in extents.values():
        parts.sort(key=lambda info: info.offset)
        assert len(parts) == 3 * 3
        assert all(info.offset + info.nbytes == after.offset for info, after in pairwise(parts))


def test_matrices_that_layers_read_directly_are_not_quantized(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "pad_token_id": 0}
    config = AutoConfig.for_model("mamba", vocab_size=VOCABULARY, time_step_rank=64, **sizes)
    pack_model(str(write_config(tmp_path / "mamba", config)), "int8", out=tmp_path / "pack")
    tensors = open_checkpoint(str(tmp_path / "pack")).tensors
    packed = {
        name.rpartition("mixer.")[2] for name, weight in tensors.items() if isinstance(weight, PackedInfo)
    }
    assert packed == {"in_proj.weight", "out_proj.weight", "x_proj.weight"}


def test_an_expert_of_a_stack_is_one_extent(tmp_path: Path) -> None:
    """Matrices and biases are split; results are the same with all experts in memory and with some."""
    pack_model(str(write_model(tmp_path / "moe", "gpt_oss", **SIZES)), "nf4", out=tmp_path / "pack")
    model = open_model(tmp_path / "pack")
    assert model.experts.count and all(len(unit.layout.extents) == 1 for unit in model.experts.units)
    for unit in model.experts.units:
        parts = sorted(unit.layout.places.values(), key=lambda place: place[0])
        assert all(start + info.nbytes == after for (start, info), (after, _) in pairwise(parts))
    says = list[torch.Tensor]()
    layers = len(model.layers)
    for placement in (Placement.in_memory(layers, range(layers), 0), on_demand_placement(layers, 3)):
        model = open_model(tmp_path / "pack")
        model.load(placement, 8, nothing)
        with torch.no_grad():
            hidden = model.tree_model.hidden(
                torch.tensor([5, 9, 2, 40]), TreeContext.chain(4, torch.device("cpu"))
            )
            says.append(model.tree_model.logits(hidden))
        model.close()
    assert torch.equal(*says)


def test_a_stack_with_a_missing_expert_is_refused(tmp_path: Path) -> None:
    source, pack = write_model(tmp_path / "moe", "gpt_oss", **SIZES), tmp_path / "pack"
    pack_model(str(source), "int8", out=pack)
    tensors = dict(open_checkpoint(str(pack)).tensors)
    model = build_skeleton(pack, torch.float32).model
    assert map_weights(model, tensors)
    del tensors["model.layers.1.mlp.experts.down_proj.3"]
    with pytest.raises(CheckpointError, match=r"experts.*\[3, .*config.json requires \[4, "):
        map_weights(model, tensors)


def test_kept_float16_becomes_bfloat16(bench: Bench, tmp_path: Path) -> None:
    source = Path(shutil.copytree(bench.model, tmp_path / "half"))
    tensors = {name: tensor.half() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    pack_model(str(source), "nf4", out=bench.out)
    name = "model.layers.0.input_layernorm.weight"
    assert torch.equal(load_file(bench.out / "model-layer-0000.safetensors")[name], tensors[name].bfloat16())


def test_a_quantized_gguf_file_is_quantized_again_only_on_request(tmp_path: Path) -> None:
    from gguf import GGMLQuantizationType

    from tests.support.gguf_families import tiny_model
    from tests.support.gguf_files import write_gguf

    file, cache = tmp_path / "tiny.gguf", tmp_path / "cache"
    write_gguf(file, tiny_model("llama"), "llama", kind=GGMLQuantizationType.Q8_0)
    with pytest.raises(UnsupportedModelError, match=r"quantized already \(Q8_0\): run it as it is"):
        pack_model(str(file), "nf4", out=tmp_path / "pack", cache_dir=cache)
    assert not cache.exists()  # nothing was unpacked
    assert pack_model(str(file), "nf4", twice=True, out=tmp_path / "pack", cache_dir=cache).files == 4
    weight = open_checkpoint(str(tmp_path / "pack")).tensors["model.layers.0.self_attn.q_proj.weight"]
    assert isinstance(weight, PackedInfo)


def test_the_engine_packs_on_first_use(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFSPEC_CACHE", str(tmp_path / "cache"))
    settings: dict[str, Any] = {
        "dtype": "float32",
        "context": 64,
        "draft": "none",
        "notify": bench.events.append,
    }
    request = [5, 6, 7], offspec.SamplingParams(max_tokens=12, ignore_eos=True)
    with offspec.load(str(bench.model), quantize="nf4", **settings) as engine:
        answer = engine.generate(*request)
        assert engine.config.model == str(bench.model)
    assert "packing" in bench.messages
    bench.events.clear()
    with offspec.load(str(bench.model), quantize="nf4", **settings) as engine:
        assert engine.generate(*request).token_ids == answer.token_ids
    assert "packing" not in bench.messages
    plain = Path(shutil.copytree(bench.model, tmp_path / "plain"))
    tensors = load_file(plain / "model.safetensors")
    (pack,) = (tmp_path / "cache" / "packed").glob("tiny-nf4-*")
    for name, weight in open_checkpoint(str(pack)).tensors.items():
        packed = isinstance(weight, PackedInfo)
        tensors[name] = values(pack, name) if packed else load_file(weight.file)[name].float()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    with offspec.load(str(plain), **settings) as engine:
        assert engine.generate(*request).token_ids == answer.token_ids
