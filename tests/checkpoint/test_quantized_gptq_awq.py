"""GPTQ and AWQ checkpoints: their weights, and refused variants."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec.checkpoint import open_checkpoint
from offspec.core.errors import CheckpointError, HeaderError, MissingTensorError, UnsupportedModelError
from tests.support.packers import PackedWeight, awq, gptq, write
from tests.support.quantized_files import Damage, change, check, damages, refused, values_of

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(1)


@pytest.mark.parametrize(("group", "dtype"), [(32, torch.float16), (64, torch.bfloat16), (-1, torch.float16)])
def test_awq(tmp_path: Path, group: int, dtype: torch.dtype) -> None:
    modules = {UP: awq((192, 128), group, dtype), DOWN: awq((128, 192), group, dtype)}
    check(write(tmp_path, AWQ | {"group_size": group}, modules), modules)


def test_awq_with_legacy_names(tmp_path: Path) -> None:
    modules = {UP: awq((64, 64), 32)}
    spelt = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM", "zero_point": True}
    check(write(tmp_path, spelt, modules), modules)


@pytest.mark.parametrize(
    ("bits", "group", "desc_act", "version"),
    [
        (2, 32, False, "gptq"),
        (2, -1, True, "gptq_v2"),
        (3, 32, True, "gptq"),
        (3, -1, False, "gptq_v2"),
        (4, 32, True, "gptq_v2"),
        (4, -1, False, "gptq"),
        (8, 32, False, "gptq_v2"),
        (8, -1, True, "gptq"),
    ],
)
def test_gptq(tmp_path: Path, bits: int, group: int, desc_act: bool, version: str) -> None:
    how = {"desc_act": desc_act, "less_one": version == "gptq"}
    modules = {UP: gptq((192, 128), bits, group, **how), DOWN: gptq((128, 192), bits, group, **how)}
    said = {"bits": bits, "group_size": group, "desc_act": desc_act, "checkpoint_format": version}
    check(write(tmp_path, GPTQ | said, modules), modules)


def test_trivial_order_is_dropped(tmp_path: Path) -> None:
    """Static groups have consecutive inputs regardless of `desc_act`; older files have no `g_idx`."""
    modules = {UP: gptq((64, 64), group=32), DOWN: gptq((64, 64), group=32)}
    del modules[DOWN].tensors["g_idx"]
    write(tmp_path, GPTQ | {"desc_act": True, "static_groups": True}, modules)
    check(tmp_path, modules)
    for weight in open_checkpoint(str(tmp_path)).tensors.values():
        assert [part for part, _ in weight.parts] == ["qweight", "qzeros", "scales"]  # type: ignore[union-attr]


def test_unquantized_modules(tmp_path: Path) -> None:
    modules = {
        UP: gptq((64, 64), group=32),
        DOWN: PackedWeight({"weight": torch.ones(2, 2)}, torch.ones(2, 2)),
    }
    modules[UP].tensors["bias"] = torch.zeros(64)
    folder = write(tmp_path, GPTQ | {"dynamic": {"-:.*down_proj": {}}}, modules)
    tensors = open_checkpoint(str(folder)).tensors
    assert tensors.keys() == {f"{UP}.weight", f"{UP}.bias", f"{DOWN}.weight"}
    assert torch.equal(values_of(tensors[f"{DOWN}.weight"]), torch.ones(2, 2))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (AWQ | {"version": "gemv"}, "version 'gemv'"),
        (AWQ | {"bits": 8}, "8 bits"),
        (AWQ | {"zero_point": False}, "without zero points"),
        (GPTQ | {"checkpoint_format": "marlin"}, "format 'marlin'"),
        (GPTQ | {"is_marlin_format": True}, "unsupported variant of GPTQ"),
        (GPTQ | {"bits": 5}, "5 bits"),
        (GPTQ | {"dynamic": {"+:.*up_proj": {"bits": 8}}}, "separate settings for '+:.*up_proj'"),
    ],
)
def test_unsupported_formats_are_refused_by_name(tmp_path: Path, settings: dict[str, Any], why: str) -> None:
    module = awq((64, 64), 32) if settings["quant_method"] == "awq" else gptq((64, 64), group=32)
    message = refused(write(tmp_path, settings, {UP: module}), UnsupportedModelError)
    assert why in message and "GGUF" in message


@pytest.mark.parametrize(
    ("part", "make", "error"),
    damages(
        {
            "awq scales": "half integers missing",
            "awq qzeros": "missing",
            "awq qweight": "half flat",
            "gptq scales": "half",
            "gptq qzeros": "narrow",
            "gptq qweight": "half flat",
            "gptq g_idx": "half retyped high low",
        }
    ),
)
def test_damaged_parts(tmp_path: Path, part: str, make: Damage, error: type[CheckpointError]) -> None:
    method, name = part.split()
    settings, module = (AWQ, awq((64, 64), 32)) if method == "awq" else (GPTQ, gptq((64, 64), group=32))
    folder = write(tmp_path, settings, {UP: module})
    assert UP in refused(change(folder, f"{UP}.{name}", make), error)


@pytest.mark.parametrize(
    ("method", "size"),
    [
        *(("awq", size) for size in (16, 33, -2, "32", True)),
        *(("gptq", size) for size in (64, 0, 2**40, None)),
    ],
)
def test_group_size_that_contradicts_the_scales(tmp_path: Path, method: str, size: object) -> None:
    settings, module = (AWQ, awq((96, 96), 32)) if method == "awq" else (GPTQ, gptq((96, 96), group=32))
    refused(write(tmp_path, settings | {"group_size": size}, {UP: module}), HeaderError)


def without_order(folder: Path, **settings: Any) -> Path:
    module = gptq((64, 64), group=32)
    del module.tensors["g_idx"]
    return write(folder, GPTQ | settings, {UP: module})


def test_missing_order(tmp_path: Path) -> None:
    assert f"{UP}.g_idx" in refused(without_order(tmp_path, desc_act=True), MissingTensorError)


@pytest.mark.parametrize("group", [-1, 64])
def test_one_group_needs_no_order(tmp_path: Path, group: int) -> None:
    module = gptq((64, 64), group=group)
    del module.tensors["g_idx"]
    check(write(tmp_path, GPTQ | {"group_size": group, "desc_act": True}, {UP: module}), {UP: module})


@pytest.mark.parametrize(
    ("bits", "stored", "told", "symmetric", "agree"),
    [
        (2, "gptq_v2", "gptq", True, False),
        (4, "gptq", "gptq_v2", True, False),
        (4, "gptq_v2", None, True, False),
        (8, "gptq", "gptq_v2", True, False),
        (3, "gptq_v2", "gptq", True, True),  # 3-bit zero points straddle words
        (4, "gptq", None, True, True),
        (4, "gptq_v2", "gptq_v2", True, True),
        (4, "gptq", "gptq_v2", False, True),
        (4, "gptq_v2", None, None, True),
    ],
)
def test_zero_points_reveal_the_version(
    tmp_path: Path, bits: int, stored: str, told: str | None, symmetric: bool | None, agree: bool
) -> None:
    """The version is detected if all zero points are the middle of the range."""
    module = gptq((64, 64), bits, 32)
    middle = 2 ** (bits - 1) - (stored == "gptq")
    word = sum(middle << place for place in range(0, 32, bits))
    module.tensors["qzeros"].fill_(torch.tensor(word).int())
    folder = write(tmp_path, GPTQ | {"bits": bits, "checkpoint_format": told, "sym": symmetric}, {UP: module})
    if agree:
        assert open_checkpoint(str(folder)).tensors.keys() == {f"{UP}.weight"}
    else:
        message = refused(folder, HeaderError)
        assert f"is of format {stored}," in message and f"says {told or 'gptq'};" in message


@pytest.mark.parametrize("dynamic", [5, "-:x", ["-:x"]])
def test_invalid_rules(tmp_path: Path, dynamic: object) -> None:
    folder = write(tmp_path, GPTQ | {"dynamic": dynamic}, {UP: gptq((64, 64), group=32)})
    assert "dynamic" in refused(folder, HeaderError)


def test_groups_that_do_not_divide_the_inputs(tmp_path: Path) -> None:
    folder = write(tmp_path, GPTQ | {"group_size": 48}, {UP: gptq((64, 64), group=32)})
    with pytest.raises(HeaderError, match=r"multiple of the group size 48.*GGUF") as caught:
        open_checkpoint(str(without_order(folder, group_size=48)))
    assert "download" not in str(caught.value)


@pytest.mark.parametrize("name", ["act", "gelu_impl"])
def test_scales_of_activations(tmp_path: Path, name: str) -> None:
    divided = PackedWeight({"scales": torch.ones(64)}, torch.ones(1))
    folder = write(tmp_path, AWQ, {UP: awq((64, 64), 32), f"transformer.h.0.mlp.{name}": divided})
    message = refused(folder, UnsupportedModelError)
    assert f"mlp.{name}.scales" in message and "GGUF" in message


@pytest.mark.parametrize(
    ("method", "file", "settings"),
    [
        ("awq", "quant_config.json", {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}),
        ("gptq", "quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False, "sym": False}),
        ("awq", "quantize_config.json", AWQ),
    ],
)
def test_settings_in_their_own_file(tmp_path: Path, method: str, file: str, settings: dict[str, Any]) -> None:
    module = awq((64, 64), 32) if method == "awq" else gptq((64, 64), group=32)
    folder = write(tmp_path, {}, {UP: module})
    message = refused(folder, HeaderError)
    assert "quantization_config of config.json is absent" in message
    (folder / file).write_text(json.dumps(settings))
    check(folder, {UP: module})
    config = open_checkpoint(str(folder)).config
    assert config["quantization_config"]["quant_method"] == method
    (folder / file).write_text(json.dumps(settings | {"group_size": 64, "q_group_size": 64}))
    refused(folder, HeaderError)


def test_settings_that_belong_to_nothing(tmp_path: Path) -> None:
    dense, packed = PackedWeight({"weight": torch.ones(2, 2)}, torch.ones(2, 2)), awq((64, 64), 32)
    for name, settings, module in (("a", {}, dense), ("b", AWQ, packed)):
        folder = write(tmp_path / name, settings, {UP: module})
        (folder / "quant_config.json").write_text("[]")
        check(folder, {UP: module})
