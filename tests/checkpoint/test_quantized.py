"""Settings in quantization_config, fine-grained FP8, and weights with undeclared scales."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from offspec.checkpoint import open_checkpoint
from offspec.checkpoint.tensors import slice_of
from offspec.core.errors import CheckpointError, HeaderError, UnsupportedModelError
from offspec.model.probe.build import build_skeleton
from offspec.model.weights import map_weights
from tests.support.packers import PackedWeight, awq, fp8, write
from tests.support.quantized_files import Damage, change, damages, refused, values_of
from tests.support.tiny_models import write_model

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [32, 64]}
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
DENSE = PackedWeight({"weight": torch.ones(2, 2)}, torch.ones(2, 2))


@pytest.mark.parametrize(("shape", "dtype"), [((64, 128), torch.float32), ((48, 100), torch.bfloat16)])
def test_fp8_in_blocks(tmp_path: Path, shape: tuple[int, int], dtype: torch.dtype) -> None:
    modules = {UP: fp8(shape, (32, 64), dtype), "lm_head": DENSE}
    tensors = open_checkpoint(str(write(tmp_path, FP8, modules))).tensors
    assert tensors.keys() == {f"{UP}.weight", "lm_head.weight"}
    assert torch.equal(values_of(tensors[f"{UP}.weight"]), modules[UP].values)
    assert torch.equal(values_of(tensors["lm_head.weight"]), torch.ones(2, 2))


def test_fp8_experts_in_one_tensor(tmp_path: Path) -> None:
    each = [fp8((64, 128), (32, 64)) for _ in range(3)]
    codes, scales = (
        torch.stack([made.tensors[name] for made in each]) for name in ("weight", "weight_scale_inv")
    )
    fused = PackedWeight({"gate_up_proj": codes, "gate_up_proj_scale_inv": scales}, codes)
    name = "model.layers.0.mlp.experts"
    weight = open_checkpoint(str(write(tmp_path, FP8, {name: fused}))).tensors[f"{name}.gate_up_proj"]
    assert torch.equal(values_of(weight), torch.stack([made.values for made in each]))
    assert torch.equal(values_of(slice_of(weight, 2))[0], each[2].values)


@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])
def test_fp8_with_one_scale(tmp_path: Path, name: str) -> None:
    module = fp8((64, 128), None)
    module.tensors[name] = module.tensors.pop("weight_scale_inv")
    module.tensors["input_scale"] = torch.ones(())
    tensors = open_checkpoint(str(write(tmp_path, FP8 | {"weight_block_size": None}, {UP: module}))).tensors
    assert tensors.keys() == {f"{UP}.weight", f"{UP}.input_scale"}
    assert torch.equal(values_of(tensors[f"{UP}.weight"]), module.values)


@pytest.mark.parametrize(
    ("name", "make", "error"),
    damages({"weight_scale_inv": "half integers gone", "weight": "half retyped missing"}),
)
def test_damaged_fp8(tmp_path: Path, name: str, make: Damage, error: type[CheckpointError]) -> None:
    folder = write(tmp_path, FP8, {UP: fp8((64, 128), (32, 64)), DOWN: fp8((64, 64), (32, 64))})
    assert UP in refused(change(folder, f"{UP}.{name}", make), error)


@pytest.mark.parametrize("block", [[64, 64], [32], [32, -64], "32x64", [32.0, 64], [True, 64], 32])
def test_fp8_with_other_block_sizes(tmp_path: Path, block: object) -> None:
    refused(write(tmp_path, FP8 | {"weight_block_size": block}, {UP: fp8((64, 128), (32, 64))}), HeaderError)


@pytest.mark.parametrize("method", ["hqq", "auto-round", None, 5, "x\ny"])
def test_unsupported_methods(tmp_path: Path, method: object) -> None:
    message = refused(write(tmp_path, {"quant_method": method}, {UP: DENSE}), UnsupportedModelError)
    assert str(method or "unnamed").replace("\n", "\\n") in message
    assert "bf16" in message and "GGUF" in message


@pytest.mark.parametrize("found", [[], "awq", 4])
def test_invalid_quantization_config(tmp_path: Path, found: object) -> None:
    write(tmp_path, {}, {UP: DENSE})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": found}))
    if found:
        refused(tmp_path, HeaderError)


@pytest.mark.parametrize("place", ["text_config", None])
def test_locations_of_the_configuration(tmp_path: Path, place: str | None) -> None:
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
    module = awq((64, 64), 32)
    write(tmp_path, settings, {UP: module})
    config: dict[str, Any] = {"compression_config": settings}
    if place:
        config = {"quantization_config": None, place: {"quantization_config": settings}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(values_of(open_checkpoint(str(tmp_path)).tensors[f"{UP}.weight"]), module.values)


@pytest.mark.parametrize("method", ["bitsandbytes", "awq", "gptq", "compressed-tensors", "fp8"])
def test_weights_without_quantization(tmp_path: Path, method: str) -> None:
    message = refused(write(tmp_path, {"quant_method": method}, {UP: DENSE}), HeaderError)
    assert "no weight is quantized" in message


@pytest.mark.parametrize(
    ("settings", "tensors"),
    [
        ({}, {"weight": torch.ones(4, 4, dtype=torch.int8)}),
        ({}, {"qweight": torch.ones(4, 4, dtype=torch.int32)}),
        ({}, {"weight_packed": torch.ones(4, 4, dtype=torch.int32)}),
        ({}, {"weight_scale_inv": torch.ones(1, 1)}),
        (FP8, {"weight": torch.ones(4, 4).to(torch.float8_e4m3fn)}),
        ({"quant_method": "bitsandbytes"}, {"weight": torch.ones(4, 4, dtype=torch.int8)}),
        ({}, {"weight": torch.ones(4, 4).to(torch.float8_e4m3fn)}),
        ({}, {"weight": torch.ones(4, 4).to(torch.float8_e5m2), "scale_weight": torch.ones(())}),
        ({}, {"fused": torch.ones(2, 4, 4).to(torch.float8_e4m3fn), "fused_scale_inv": torch.ones(2, 1, 1)}),
        ({}, {"fused.absmax": torch.ones(4)}),
    ],
)
def test_unexplained_tensors(tmp_path: Path, settings: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Unexplained numbers would otherwise be taken for weights, or be reported as missing."""
    message = refused(write(tmp_path, settings, {UP: PackedWeight(tensors, torch.ones(1))}), HeaderError)
    assert UP in message and "GGUF" in message


def test_duplicate_weight(tmp_path: Path) -> None:
    module = awq((64, 64), 32)
    module.tensors["weight"] = torch.ones(64, 64)
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
    assert "twice" in refused(write(tmp_path, settings, {UP: module}), HeaderError)


SCALES = ("k_scale", "v_scale", "input_scale", "output_scale", "per_expert_scale")


@pytest.mark.parametrize("settings", [{}, FP8])
def test_scales_and_integers_that_do_not_belong_to_weights(tmp_path: Path, settings: dict[str, Any]) -> None:
    others = {name: torch.ones(1) for name in SCALES} | {"bias": torch.ones(4, 4, dtype=torch.uint8)}
    others["input_zero_point"] = torch.zeros(1).to(torch.float8_e4m3fn)
    modules = {DOWN: PackedWeight(DENSE.tensors | others, DENSE.values)}
    if settings:
        modules[UP] = fp8((64, 128), (32, 64))
    tensors = open_checkpoint(str(write(tmp_path, settings, modules))).tensors
    assert tensors.keys() - {f"{UP}.weight"} == {f"{DOWN}.{name}" for name in ("weight", *others)}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_codes_that_a_model_would_treat_as_values(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = write_model(tmp_path / "model", "qwen3_moe", num_hidden_layers=1)
    stored = load_file(folder / "model.safetensors")
    experts = "model.layers.0.mlp.experts"
    gate, up, down = (
        torch.stack([stored.pop(f"{experts}.{number}.{name}_proj.weight") for number in range(4)])
        for name in ("gate", "up", "down")
    )
    stored |= {f"{experts}.gate_up_proj": torch.cat([gate, up], 1), f"{experts}.down_proj": down.to(dtype)}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(str(folder))
    skeleton = build_skeleton(checkpoint.folder, torch.float32)
    with pytest.raises(HeaderError, match=r"down_proj is stored as [UIF]\d+.* GGUF"):
        map_weights(skeleton.model, checkpoint.tensors)


def test_two_descriptions_of_one_weight(tmp_path: Path) -> None:
    module = fp8((64, 128), None)
    module.tensors["weight_scale"] = module.tensors["weight_scale_inv"] * 2
    message = refused(write(tmp_path, FP8 | {"weight_block_size": None}, {UP: module}), HeaderError)
    assert f"{UP}.weight" in message and "quantized in two ways" in message


def test_unsupported_format_does_not_suggest_a_download(tmp_path: Path) -> None:
    module = fp8((64, 128), (32, 64))
    module.tensors["weight_scale_inv"] = torch.ones(2, 2).to(torch.float8_e8m0fnu)
    message = refused(write(tmp_path, FP8, {UP: module}), HeaderError)
    assert "GGUF" in message and "download" not in message
