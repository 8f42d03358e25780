"""compressed-tensors checkpoints written by that library: their weights, and refused variants."""

from pathlib import Path
from typing import Any

import pytest
import torch

from offspec.checkpoint import open_checkpoint
from offspec.core.errors import CheckpointError, HeaderError, MissingTensorError, UnsupportedModelError
from tests.support.packers import PackedWeight, compressed, write
from tests.support.quantized_files import Damage, change, check, damages, refused

UP, DOWN, GATE = (f"model.layers.0.mlp.{name}_proj" for name in ("up", "down", "gate"))
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}


def settings(format: str, *groups: dict[str, Any]) -> dict[str, Any]:
    named = {f"group_{number}": {"targets": ["Linear"], **group} for number, group in enumerate(groups)}
    rest = {"ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed"}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": named, **rest}


def int4(**weights: Any) -> dict[str, Any]:
    """Return settings of 4-bit weights, with further fields."""
    return settings("pack-quantized", {"weights": INT4 | weights})


def packed(shape: tuple[int, int] = (64, 64)) -> PackedWeight:
    return compressed(shape, "pack-quantized", torch.bfloat16, **INT4)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(1)


@pytest.mark.parametrize(
    ("format", "symmetric", "dtype", "how"),
    [
        ("pack-quantized", True, torch.bfloat16, {"num_bits": 4, "strategy": "group", "group_size": 32}),
        ("pack-quantized", False, torch.float16, {"num_bits": 4, "strategy": "group", "group_size": 32}),
        ("pack-quantized", False, torch.float32, {"num_bits": 4, "strategy": "channel"}),
        ("pack-quantized", True, torch.float16, {"num_bits": 4, "strategy": "tensor"}),
        ("pack-quantized", False, torch.bfloat16, {"num_bits": 3, "strategy": "group", "group_size": 64}),
        ("pack-quantized", True, torch.float32, {"num_bits": 8, "strategy": "channel"}),
        ("int-quantized", False, torch.bfloat16, {"num_bits": 8, "strategy": "channel"}),
        ("int-quantized", True, torch.float32, {"num_bits": 8, "strategy": "tensor"}),
        ("naive-quantized", True, torch.float16, {"num_bits": 4, "strategy": "group", "group_size": 32}),
    ],
)
def test_integers(
    tmp_path: Path, format: str, symmetric: bool, dtype: torch.dtype, how: dict[str, Any]
) -> None:
    how = how | {"symmetric": symmetric, "type": "int"}
    modules = {
        name: compressed(shape, format, dtype, **how) for name, shape in ((UP, (96, 64)), (DOWN, (64, 192)))
    }
    check(write(tmp_path, settings(format, {"weights": how}), modules), modules)


@pytest.mark.parametrize(
    ("format", "dtype", "how"),
    [
        ("float-quantized", torch.bfloat16, {"strategy": "tensor"}),
        ("naive-quantized", torch.float32, {"strategy": "channel"}),
        ("float-quantized", torch.float32, {"strategy": "block", "block_structure": [32, 64]}),
    ],
)
def test_floats(tmp_path: Path, format: str, how: dict[str, Any], dtype: torch.dtype) -> None:
    how = how | {"num_bits": 8, "type": "float", "symmetric": True}
    modules = {UP: compressed((64, 128), format, dtype, **how)}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    check(write(tmp_path, settings(format, {"weights": how, "input_activations": inputs}), modules), modules)
    if "block_structure" in how:  # as in older files
        how["block_structure"] = "32x64"
        check(write(tmp_path, settings(format, {"weights": how}), modules), modules)


def test_most_specific_group_applies(tmp_path: Path) -> None:
    """Names take precedence over expressions, these over classes; each group may have its own format."""
    int8 = {"num_bits": 8, "strategy": "channel", "type": "int", "symmetric": True}
    floats = {"num_bits": 8, "strategy": "tensor", "type": "float", "symmetric": True}
    modules = {
        UP: packed(),
        GATE: compressed((64, 64), "int-quantized", torch.bfloat16, **int8),
        DOWN: compressed((64, 64), "float-quantized", torch.bfloat16, **floats),
    }
    said = settings(
        "mixed-precision",
        {"weights": INT4, "format": "pack-quantized"},
        {"weights": int8, "format": "int-quantized", "targets": [r"re:.*mlp\.(gate|down)_proj$"]},
        {"weights": floats, "format": "float-quantized", "targets": [DOWN, "re:[a-z]*attention"]},
        {"weights": None, "targets": ["LlamaAttention"]},
    )
    check(write(tmp_path, said, modules), modules)


def test_ignored_modules_stay_unquantized(tmp_path: Path) -> None:
    dense = PackedWeight({"weight": torch.ones(4, 4), "input_scale": torch.ones(1)}, torch.ones(4, 4))
    folder = write(tmp_path, int4(), {UP: packed(), "lm_head": dense})
    tensors = open_checkpoint(str(folder)).tensors
    assert tensors.keys() == {f"{UP}.weight", "lm_head.weight", "lm_head.input_scale"}


@pytest.mark.parametrize("index", ["in order", "shuffled", "empty"])
def test_activation_order(tmp_path: Path, index: str) -> None:
    module = packed((64, 128))
    order = torch.arange(128) // 32
    if index == "shuffled":
        order = order[torch.randperm(128)]
        scale = module.tensors["weight_scale"].float()
        codes = module.values / scale.repeat_interleave(32, 1)
        module = PackedWeight(module.tensors, (codes.round() * scale[:, order]).bfloat16().float())
    stored = torch.full((128,), -1) if index == "empty" else order
    module.tensors["weight_g_idx"] = stored.int()
    check(write(tmp_path, int4(actorder="group"), {UP: module}), {UP: module})


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (settings("marlin-24", {"weights": INT4}), "'marlin-24'"),
        (settings("mixed-precision", {"weights": INT4}), "'mixed-precision'"),
        (settings("pack-quantized", {"weights": INT4, "format": "mxfp8-quantized"}), "'mxfp8-quantized'"),
        (int4() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparse-24-bitmask'"),
        (int4() | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    ],
)
def test_unsupported_formats_are_refused_by_name(tmp_path: Path, said: dict[str, Any], why: str) -> None:
    message = refused(write(tmp_path, said, {UP: packed()}), UnsupportedModelError)
    assert why in message and "GGUF" in message


PARTS = {
    "weight_scale": "narrow integers gone",
    "weight_packed": "narrow missing",
    "weight_zero_point": "missing",
}
PARTS |= {"weight_shape": "missing half negative huge long", "weight_g_idx": "half high low"}


@pytest.mark.parametrize(("name", "make", "error"), damages(PARTS))
def test_damaged_parts(tmp_path: Path, name: str, make: Damage, error: type[CheckpointError]) -> None:
    how = INT4 | {"symmetric": False, "group_size": 64}
    module = compressed((64, 128), "pack-quantized", torch.bfloat16, **how)
    module.tensors["weight_g_idx"] = (torch.arange(128) // 64).int()
    folder = write(tmp_path, settings("pack-quantized", {"weights": how}), {UP: module})
    assert UP in refused(change(folder, f"{UP}.{name}", make), error)


NO_GROUPS: list[Any] = [[], {"a": None}, {"W4A16": ["Linear"]}]


@pytest.mark.parametrize(
    "said",
    [
        *(int4(group_size=size) for size in (64, 0)),
        *(int4(num_bits=bits) for bits in (8, 0)),
        *(int4(strategy=strategy) for strategy in ("channel", "spiral")),
        *(int4(strategy="block", block_structure=block) for block in ("32", [0, 32])),
        int4(type="float"),
        int4(symmetric="false"),
        *(settings("pack-quantized", {"weights": weights}) for weights in (None, ["int4"])),
        *(
            settings("pack-quantized", {"weights": INT4, "targets": targets})
            for targets in ("Linear", ["re:(("], ["Embedding", "re:.*down_proj"])
        ),
        *(int4() | {"config_groups": groups} for groups in NO_GROUPS),
    ],
)
def test_contradicting_groups(tmp_path: Path, said: dict[str, Any]) -> None:
    refused(write(tmp_path, said, {UP: packed((64, 128))}), HeaderError)


def test_weights_that_are_not_quantized_yet(tmp_path: Path) -> None:
    module = PackedWeight(
        {"weight": torch.ones(64, 64), "weight_scale": torch.ones(64, 2)}, torch.ones(64, 64)
    )
    folder = write(tmp_path, settings("dense", {"weights": INT4}), {UP: module})
    assert "F32 with a scale" in refused(folder, HeaderError)


@pytest.mark.parametrize("order", ["GROUP", "dynamic", True])
def test_missing_activation_order(tmp_path: Path, order: object) -> None:
    folder = write(tmp_path, int4(actorder=order), {UP: packed()})
    assert f"{UP}.weight_g_idx" in refused(folder, MissingTensorError)


@pytest.mark.parametrize("order", ["weight", "static", False])
def test_activation_orders_without_effect(tmp_path: Path, order: object) -> None:
    module = packed()
    check(write(tmp_path, int4(actorder=order), {UP: module}), {UP: module})


@pytest.mark.parametrize(("format", "told"), [("pack-quantized", True), ("int-quantized", None)])
def test_zero_points_with_symmetric_quantization(tmp_path: Path, format: str, told: bool | None) -> None:
    bits = {"num_bits": 4 if format == "pack-quantized" else 8, "type": "int", "strategy": "channel"}
    module = compressed((64, 64), format, torch.bfloat16, **bits, symmetric=False)
    said = bits if told is None else bits | {"symmetric": told}
    folder = write(tmp_path, settings(format, {"weights": said}), {UP: module})
    message = refused(folder, HeaderError)
    assert f"{UP}.weight_zero_point" in message and "symmetric" in message


@pytest.mark.parametrize(
    ("format", "how", "dtype"),
    [
        ("pack-quantized", INT4, torch.int8),
        ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, torch.int8),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, torch.float8_e4m3fn),
    ],
)
def test_zero_points_of_zero(tmp_path: Path, format: str, how: dict[str, Any], dtype: torch.dtype) -> None:
    module = compressed((64, 64), format, torch.bfloat16, **how | {"symmetric": True})
    zeros = torch.zeros(module.tensors["weight_scale"].shape)
    module.tensors["weight_zero_point"] = zeros.to(dtype)
    check(write(tmp_path, settings(format, {"weights": how}), {UP: module}), {UP: module})
    module.tensors["weight_zero_point"] = (zeros + 1).to(dtype)
    refused(write(tmp_path, settings(format, {"weights": how}), {UP: module}), HeaderError)


@pytest.mark.parametrize(
    "target",
    [
        r".*\.layers\..*\.mlp\..*(gate|up|down)_proj$",
        r"(model\.)?(language_model\.)?layers\.\d{1,3}\.mlp\.[gu][^x-z]*_proj",
        r".*layers\.(" + "|".join(map(str, range(94))) + r")\.mlp\.(gate|up|down)_proj.*",
    ],
)
def test_matching_regular_expressions(tmp_path: Path, target: str) -> None:
    module, said = packed(), settings("pack-quantized", {"weights": INT4, "targets": [f"re:{target}"]})
    check(write(tmp_path, said, {UP: module}), {UP: module})


SLOW = ["(([a-z0-9_.]+)+)+!", "(.|.){40}!", "(?x)(.|.)#\n*!", "(.|.)" * 40 + "!"]
SLOW += [".*" * 12 + "!", r"[]\])]" + ".*" * 12 + "!"]


@pytest.mark.parametrize("target", SLOW)
def test_regular_expressions_with_exponential_time(tmp_path: Path, target: str) -> None:
    said = settings("pack-quantized", {"weights": INT4, "targets": [f"re:{target}"]})
    message = refused(write(tmp_path, said, {"a" * 60: packed()}), UnsupportedModelError)
    assert "may never finish" in message and "GGUF" in message
