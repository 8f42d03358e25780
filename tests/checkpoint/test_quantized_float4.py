"""NVFP4 as compressed-tensors and Model Optimizer store it, and FP8 as the latter does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec.checkpoint import open_checkpoint
from offspec.core.errors import CheckpointError, HeaderError, UnsupportedModelError
from tests.support.packers import PackedWeight, nvfp4, write
from tests.support.quantized_files import Damage, change, damages, refused, values_of

UP, DOWN = "model.layers.0.mlp.experts.3.up_proj", "model.layers.0.mlp.experts.3.down_proj"
WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


@pytest.mark.parametrize(("shape", "divided"), [((64, 128), False), ((3, 48), True)])
def test_nvfp4(tmp_path: Path, shape: tuple[int, int], divided: bool) -> None:
    modules = {UP: nvfp4(shape, divided), DOWN: nvfp4((48, 64), divided)}
    tensors = open_checkpoint(str(write(tmp_path, COMPRESSED if divided else MODELOPT, modules))).tensors
    for name, module in modules.items():
        weight = tensors[f"{name}.weight"]
        assert weight.shape == tuple(module.values.shape)
        assert torch.equal(values_of(weight), module.values)
    assert {name for name in tensors if "input" not in name} == {f"{name}.weight" for name in modules}


def test_settings_in_their_own_file(tmp_path: Path) -> None:
    module = nvfp4((64, 128))
    write(tmp_path, {}, {UP: module})
    settings = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text("{}")
    assert torch.equal(values_of(open_checkpoint(str(tmp_path)).tensors[f"{UP}.weight"]), module.values)


def test_fp8_of_model_optimizer(tmp_path: Path) -> None:
    codes, scale = (torch.randn(64, 48) * 100).to(torch.float8_e4m3fn), torch.tensor(0.0071)
    module = PackedWeight({"weight": codes, "weight_scale": scale}, codes.float() * scale)
    folder = write(tmp_path, MODELOPT | {"quant_algo": "FP8"}, {UP: module})
    assert torch.equal(values_of(open_checkpoint(str(folder)).tensors[f"{UP}.weight"]), module.values)


@pytest.mark.parametrize(
    ("divided", "scale", "codes"), [(False, "scale_2", ""), (True, "global_scale", "_packed")]
)
@pytest.mark.parametrize(
    ("part", "make", "error"),
    damages({"weight_scale": "narrow retyped", "scale": "twice retyped missing", "codes": "narrow flat"}),
)
def test_damaged_parts(
    tmp_path: Path,
    part: str,
    make: Damage,
    error: type[CheckpointError],
    divided: bool,
    scale: str,
    codes: str,
) -> None:
    folder = write(tmp_path, COMPRESSED if divided else MODELOPT, {UP: nvfp4((64, 128), divided)})
    name = {"scale": f"weight_{scale}", "codes": f"weight{codes}"}.get(part, part)
    assert UP in refused(change(folder, f"{UP}.{name}", make), error)


@pytest.mark.parametrize(
    "weights", [{"strategy": "group"}, {"num_bits": 8}, {"type": "int"}, {"symmetric": False}]
)
def test_codes_that_contradict_the_configuration(tmp_path: Path, weights: dict[str, Any]) -> None:
    settings = COMPRESSED | {"config_groups": {"g": {"targets": ["Linear"], "weights": WEIGHTS | weights}}}
    assert "4-bit floats" in refused(write(tmp_path, settings, {UP: nvfp4((64, 128), True)}), HeaderError)


@pytest.mark.parametrize("algorithm", ["NVFP4_AWQ", None])
def test_unsupported_algorithms(tmp_path: Path, algorithm: object) -> None:
    folder = write(tmp_path, MODELOPT | {"quant_algo": algorithm}, {UP: nvfp4((64, 128))})
    assert repr(str(algorithm)) in refused(folder, UnsupportedModelError)


def test_scales_for_inputs(tmp_path: Path) -> None:
    module = nvfp4((64, 128))
    module.tensors["pre_quant_scale"] = torch.ones(128)
    assert "pre_quant_scale" in refused(write(tmp_path, MODELOPT, {UP: module}), UnsupportedModelError)
