"""Checkpoints of compressed-tensors, packed by that library: what is found in them, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offspec.checkpoint import open_checkpoint
from offspec.core.errors import CheckpointError, HeaderError, MissingTensorError, UnsupportedModelError
from tests.support.packers import Packed, compressed, write
from tests.support.quantised_files import change, check, refused

UP, DOWN, GATE = (f"model.layers.0.mlp.{name}_proj" for name in ("up", "down", "gate"))
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}


def settings(format: str, *groups: dict[str, Any], **others: Any) -> dict[str, Any]:
    named = {f"group_{number}": {"targets": ["Linear"], **group} for number, group in enumerate(groups)}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": named,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        **others,
    }


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("format", "how"),
    [
        ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
        ("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
        ("pack-quantized", {"num_bits": 4, "strategy": "tensor"}),
        ("pack-quantized", {"num_bits": 3, "strategy": "group", "group_size": 64}),
        ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
        ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
        ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
        ("naive-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    ],
)
def test_integers(
    tmp_path: Path, format: str, how: dict[str, Any], symmetric: bool, dtype: torch.dtype
) -> None:
    how = how | {"symmetric": symmetric, "type": "int"}
    modules = {
        UP: compressed((96, 64), format, dtype, **how),
        DOWN: compressed((64, 192), format, dtype, **how),
    }
    check(write(tmp_path, settings(format, {"weights": how}), modules), modules)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "how",
    [{"strategy": "tensor"}, {"strategy": "channel"}, {"strategy": "block", "block_structure": [32, 64]}],
)
@pytest.mark.parametrize("format", ["float-quantized", "naive-quantized"])
def test_floats(tmp_path: Path, format: str, how: dict[str, Any], dtype: torch.dtype) -> None:
    how = how | {"num_bits": 8, "type": "float", "symmetric": True}
    modules = {UP: compressed((64, 128), format, dtype, **how)}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    check(write(tmp_path, settings(format, {"weights": how, "input_activations": inputs}), modules), modules)
    if "block_structure" in how:  # as older files have it
        how["block_structure"] = "32x64"
        check(write(tmp_path, settings(format, {"weights": how}), modules), modules)


def test_the_group_whose_target_fits_best(tmp_path: Path) -> None:
    """A name before an expression before a class; and each group may have a format of its own."""
    int8 = {"num_bits": 8, "strategy": "channel", "type": "int", "symmetric": True}
    floats = {"num_bits": 8, "strategy": "tensor", "type": "float", "symmetric": True}
    modules = {
        UP: compressed((64, 64), "pack-quantized", torch.bfloat16, **INT4),
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


def test_modules_that_are_ignored_stay_as_they_are(tmp_path: Path) -> None:
    dense = Packed({"weight": torch.ones(4, 4), "input_scale": torch.ones(1)}, torch.ones(4, 4))
    packed = compressed((64, 64), "pack-quantized", torch.bfloat16, **INT4)
    folder = write(tmp_path, settings("pack-quantized", {"weights": INT4}), {UP: packed, "lm_head": dense})
    tensors = open_checkpoint(str(folder)).tensors
    assert tensors.keys() == {f"{UP}.weight", "lm_head.weight", "lm_head.input_scale"}


@pytest.mark.parametrize("index", ["in order", "shuffled", "empty"])
def test_an_order_of_importance(tmp_path: Path, index: str) -> None:
    module = compressed((64, 128), "pack-quantized", torch.bfloat16, **INT4)
    order = torch.arange(128) // 32
    if index == "shuffled":
        order = order[torch.randperm(128)]
        scale = module.tensors["weight_scale"].float()
        codes = module.values / scale.repeat_interleave(32, 1)
        module = Packed(module.tensors, (codes.round() * scale[:, order]).bfloat16().float())
    stored = torch.full((128,), -1) if index == "empty" else order
    module.tensors["weight_g_idx"] = stored.int()
    said = settings("pack-quantized", {"weights": INT4 | {"actorder": "group"}})
    check(write(tmp_path, said, {UP: module}), {UP: module})


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (settings("marlin-24", {"weights": INT4}), "'marlin-24'"),
        (settings("mxfp4-pack-quantized", {"weights": INT4}), "'mxfp4-pack-quantized'"),
        (settings("mixed-precision", {"weights": INT4}), "'mixed-precision'"),
        (settings("pack-quantized", {"weights": INT4, "format": "mxfp8-quantized"}), "'mxfp8-quantized'"),
        (
            settings("pack-quantized", {"weights": INT4}, sparsity_config={"format": "sparse-24-bitmask"}),
            "'sparse-24-bitmask'",
        ),
        (
            settings("pack-quantized", {"weights": INT4}, transform_config={"config_groups": {"u": {}}}),
            "transform_config",
        ),
    ],
)
def test_other_forms_are_refused_by_name(tmp_path: Path, said: dict[str, Any], why: str) -> None:
    module = compressed((64, 64), "pack-quantized", torch.bfloat16, **INT4)
    message = refused(write(tmp_path, said, {UP: module}), UnsupportedModelError)
    assert why in message and "GGUF" in message


@pytest.mark.parametrize(
    ("name", "make", "error"),
    [
        ("weight_scale", lambda t: t[:, :1].contiguous(), HeaderError),
        ("weight_scale", lambda t: t[:-1].clone(), HeaderError),
        ("weight_scale", lambda t: t.int(), HeaderError),
        ("weight_scale", lambda t: None, HeaderError),
        ("weight_packed", lambda t: t[:, :-1].contiguous(), HeaderError),
        ("weight_packed", lambda t: t.view(torch.uint8), HeaderError),
        ("weight_packed", lambda t: None, MissingTensorError),
        ("weight_shape", lambda t: None, MissingTensorError),
        ("weight_shape", lambda t: t[:1].clone(), HeaderError),
        ("weight_shape", lambda t: -t, HeaderError),
        ("weight_shape", lambda t: t * 2**40, HeaderError),
        ("weight_shape", lambda t: t.float(), HeaderError),
        ("weight_shape", lambda t: t.repeat(10**5), HeaderError),
        ("weight_zero_point", lambda t: None, MissingTensorError),
        ("weight_zero_point", lambda t: t[:-1].clone(), HeaderError),
        ("weight_g_idx", lambda t: t[:-1].clone(), HeaderError),
        ("weight_g_idx", lambda t: t + 1, HeaderError),
        ("weight_g_idx", lambda t: t - 1, HeaderError),
    ],
)
def test_parts_that_do_not_belong_together(
    tmp_path: Path, name: str, make: Callable[[Tensor], Tensor | None], error: type[CheckpointError]
) -> None:
    how = INT4 | {"symmetric": False}
    module = compressed((64, 128), "pack-quantized", torch.bfloat16, **how)
    module.tensors["weight_g_idx"] = (torch.arange(128) // 32).int()
    folder = write(tmp_path, settings("pack-quantized", {"weights": how}), {UP: module})
    assert UP in refused(change(folder, f"{UP}.{name}", make), error)


@pytest.mark.parametrize(
    "group",
    [
        {"weights": INT4 | {"group_size": 64}},
        {"weights": INT4 | {"group_size": 0}},
        {"weights": INT4 | {"group_size": "32"}},
        {"weights": INT4 | {"num_bits": 8}},
        {"weights": INT4 | {"num_bits": 0}},
        {"weights": INT4 | {"num_bits": 9}},
        {"weights": INT4 | {"strategy": "channel"}},
        {"weights": INT4 | {"strategy": "spiral"}},
        {"weights": INT4 | {"strategy": ["group"]}},
        {"weights": INT4 | {"type": "float"}},
        {"weights": INT4 | {"strategy": "block", "block_structure": "32"}},
        {"weights": INT4 | {"strategy": "block", "block_structure": [0, 32]}},
        {"weights": INT4 | {"strategy": "block", "block_structure": [33, 65]}},
        {"weights": INT4 | {"symmetric": "false"}},
        {"weights": INT4 | {"symmetric": None}},
        {"weights": INT4 | {"symmetric": 0}},
        {"weights": ["int4"]},
        {"weights": INT4, "targets": "Linear"},
        {"weights": INT4, "targets": [4]},
        {"weights": INT4, "targets": ["re:(("]},
        {"weights": INT4, "targets": ["Embedding", "re:.*down_proj"]},
        {"weights": None},
    ],
)
def test_a_group_that_says_something_else(tmp_path: Path, group: dict[str, Any]) -> None:
    module = compressed((64, 128), "pack-quantized", torch.bfloat16, **INT4)
    refused(write(tmp_path, settings("pack-quantized", group), {UP: module}), HeaderError)


@pytest.mark.parametrize("groups", [[], "x", {"a": None}, {"W4A16": ["Linear"]}])
def test_groups_that_are_none(tmp_path: Path, groups: object) -> None:
    module = compressed((64, 128), "pack-quantized", torch.bfloat16, **INT4)
    said = settings("pack-quantized") | {"config_groups": groups}
    refused(write(tmp_path, said, {UP: module}), HeaderError)


def test_weights_that_were_not_rounded_yet(tmp_path: Path) -> None:
    module = Packed({"weight": torch.ones(64, 64), "weight_scale": torch.ones(64, 2)}, torch.ones(64, 64))
    assert "F32 beside a scale" in refused(
        write(tmp_path, settings("dense", {"weights": INT4}), {UP: module}), HeaderError
    )


@pytest.mark.parametrize("order", ["group", "GROUP", "dynamic", True])
def test_an_order_of_importance_that_is_missing(tmp_path: Path, order: object) -> None:
    module = compressed((64, 64), "pack-quantized", torch.bfloat16, **INT4)
    folder = write(
        tmp_path, settings("pack-quantized", {"weights": INT4 | {"actorder": order}}), {UP: module}
    )
    assert f"{UP}.weight_g_idx" in refused(folder, MissingTensorError)


@pytest.mark.parametrize("order", ["weight", "static", None, False])
def test_orders_that_leave_groups_as_they_are(tmp_path: Path, order: object) -> None:
    module = compressed((64, 64), "pack-quantized", torch.bfloat16, **INT4)
    said = settings("pack-quantized", {"weights": INT4 | {"actorder": order}})
    check(write(tmp_path, said, {UP: module}), {UP: module})


@pytest.mark.parametrize("told", [True, None])
@pytest.mark.parametrize("format", ["pack-quantized", "int-quantized"])
def test_zero_points_of_what_is_called_symmetric(tmp_path: Path, format: str, told: bool | None) -> None:
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
    """As the first versions wrote them for symmetric weights too."""
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
        r"(.*gate_proj|.*up_proj|.*down_proj|.*q_proj|.*k_proj|.*v_proj|.*o_proj)",
        r"(model\.)?(language_model\.)?layers\.\d{1,3}\.mlp\.[gu][^x-z]*_proj",
        r"^(?!.*(lm_head|visual)).*$",
        r".*layers\.(" + "|".join(map(str, range(94))) + r")\.mlp\.(gate|up|down)_proj.*",
    ],
)
def test_expressions_that_are_matched(tmp_path: Path, target: str) -> None:
    module = compressed((64, 64), "pack-quantized", torch.bfloat16, **INT4)
    said = settings("pack-quantized", {"weights": INT4, "targets": [f"re:{target}"]})
    check(write(tmp_path, said, {UP: module}), {UP: module})


@pytest.mark.parametrize(
    "target",
    [
        "(([a-z0-9_.]+)+)+!",
        "(a|a)*!",
        "(.|.){40}!",
        "(?x)(.|.) *!",
        "(?x)(.|.)#\n*!",
        ".?" * 40 + "!",
        "(.|.)" * 40 + "!",
        ".*" * 12 + "!",
        r"[]\])]" + ".*" * 12 + "!",
    ],
)
def test_expressions_that_might_take_for_ever(tmp_path: Path, target: str) -> None:
    module = compressed((64, 64), "pack-quantized", torch.bfloat16, **INT4)
    said = settings("pack-quantized", {"weights": INT4, "targets": [f"re:{target}"]})
    message = refused(write(tmp_path, said, {"a" * 60: module}), UnsupportedModelError)
    assert "for ever" in message and "GGUF" in message
