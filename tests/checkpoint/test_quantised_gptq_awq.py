"""Checkpoints of GPTQ and AWQ: what is found in them, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from offspec.checkpoint import open_checkpoint
from offspec.errors import CheckpointError, HeaderError, MissingTensorError, UnsupportedModelError
from tests.checkpoint.packers import Packed, awq, gptq, write
from tests.checkpoint.quantised import refused, values_of

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(1)


def check(folder: Path, modules: dict[str, Packed]) -> None:
    """All that is in the folder is these modules' weights, and their values are right."""
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.tensors.keys() == {f"{name}.weight" for name in modules}
    for name, module in modules.items():
        weight = checkpoint.tensors[f"{name}.weight"]
        assert weight.shape == tuple(module.values.shape)
        assert torch.equal(values_of(weight), module.values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", [32, 64, -1])
def test_awq(tmp_path: Path, group: int, dtype: torch.dtype) -> None:
    modules = {UP: awq((192, 128), group, dtype), DOWN: awq((128, 192), group, dtype)}
    check(write(tmp_path, AWQ | {"group_size": group}, modules), modules)


def test_awq_as_its_first_files_spell_it(tmp_path: Path) -> None:
    modules = {UP: awq((64, 64), 32)}
    spelt = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM", "zero_point": True}
    check(write(tmp_path, spelt, modules), modules)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [32, -1])
@pytest.mark.parametrize("desc_act", [False, True])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq(tmp_path: Path, bits: int, group: int, desc_act: bool, version: str) -> None:
    less_one = version == "gptq"
    modules = {
        UP: gptq((192, 128), bits, group, desc_act=desc_act, less_one=less_one),
        DOWN: gptq((128, 192), bits, group, desc_act=desc_act, less_one=less_one),
    }
    said = {"bits": bits, "group_size": group, "desc_act": desc_act, "checkpoint_format": version}
    check(write(tmp_path, GPTQ | said, modules), modules)


def test_an_order_that_is_none_is_not_kept(tmp_path: Path) -> None:
    """As with static groups, whatever `desc_act` says; and older files have no order at all."""
    modules = {UP: gptq((64, 64), group=32), DOWN: gptq((64, 64), group=32)}
    del modules[DOWN].tensors["g_idx"]
    write(tmp_path, GPTQ | {"desc_act": True, "static_groups": True}, modules)
    check(tmp_path, modules)
    for weight in open_checkpoint(str(tmp_path)).tensors.values():
        assert [part for part, _ in weight.parts] == ["qweight", "qzeros", "scales"]  # type: ignore[union-attr]


def test_modules_that_are_left_as_they_were(tmp_path: Path) -> None:
    modules = {UP: gptq((64, 64), group=32), DOWN: Packed({"weight": torch.ones(2, 2)}, torch.ones(2, 2))}
    modules[UP].tensors["bias"] = torch.zeros(64)
    folder = write(tmp_path, GPTQ | {"dynamic": {"-:.*down_proj": {}}}, modules)
    tensors = open_checkpoint(str(folder)).tensors
    assert tensors.keys() == {f"{UP}.weight", f"{UP}.bias", f"{DOWN}.weight"}
    assert torch.equal(values_of(tensors[f"{DOWN}.weight"]), torch.ones(2, 2))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (AWQ | {"version": "gemv"}, "version 'gemv'"),
        (AWQ | {"version": "marlin"}, "version 'marlin'"),
        (AWQ | {"bits": 8}, "8 bits"),
        (AWQ | {"zero_point": False}, "without zero points"),
        (GPTQ | {"checkpoint_format": "marlin"}, "format 'marlin'"),
        (GPTQ | {"is_marlin_format": True}, "GPTQ in a form"),
        (GPTQ | {"bits": 5}, "5 bits"),
        (GPTQ | {"dynamic": {"+:.*up_proj": {"bits": 8}}}, "of their own for '+:.*up_proj'"),
    ],
)
def test_other_forms_are_refused_by_name(tmp_path: Path, settings: dict[str, Any], why: str) -> None:
    module = awq((64, 64), 32) if settings["quant_method"] == "awq" else gptq((64, 64), group=32)
    message = refused(write(tmp_path, settings, {UP: module}), UnsupportedModelError)
    assert why in message and "GGUF" in message


def changed(name: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[dict[str, Tensor]], None]:
    def apply(tensors: dict[str, Tensor]) -> None:
        made = change(tensors.pop(f"{UP}.{name}"))
        if made is not None:
            tensors[f"{UP}.{name}"] = made

    return apply


def _set(place: int, value: int) -> Callable[[Tensor], Tensor]:
    def apply(tensor: Tensor) -> Tensor:
        tensor[place] = value
        return tensor

    return apply


@pytest.mark.parametrize(
    ("method", "name", "change", "error"),
    [
        ("awq", "scales", lambda t: t[:1].clone(), HeaderError),
        ("awq", "scales", lambda t: t[:, :-1].contiguous(), HeaderError),
        ("awq", "scales", lambda t: t.to(torch.int16), HeaderError),
        ("awq", "scales", lambda t: None, MissingTensorError),
        ("awq", "qzeros", lambda t: None, MissingTensorError),
        ("awq", "qweight", lambda t: t[:-8].clone(), HeaderError),
        ("awq", "qweight", lambda t: t[0].clone(), HeaderError),
        ("awq", "qweight", lambda t: t.long(), HeaderError),
        ("gptq", "scales", lambda t: t[:1].clone(), HeaderError),
        ("gptq", "scales", lambda t: None, MissingTensorError),
        ("gptq", "qzeros", lambda t: t[:, :-1].contiguous(), HeaderError),
        ("gptq", "qweight", lambda t: t[:-1].clone(), HeaderError),
        ("gptq", "qweight", lambda t: t.view(-1), HeaderError),
        ("gptq", "g_idx", lambda t: t[:-1].clone(), HeaderError),
        ("gptq", "g_idx", lambda t: t.float(), HeaderError),
        ("gptq", "g_idx", _set(5, 2), HeaderError),
        ("gptq", "g_idx", _set(5, -1), HeaderError),
        ("gptq", "g_idx", _set(0, 2**31 - 1), HeaderError),
    ],
)
def test_parts_that_do_not_belong_together(
    tmp_path: Path,
    method: str,
    name: str,
    change: Callable[[Tensor], Tensor | None],
    error: type[CheckpointError],
) -> None:
    settings, module = (AWQ, awq((64, 64), 32)) if method == "awq" else (GPTQ, gptq((64, 64), group=32))
    folder = write(tmp_path, settings, {UP: module})
    tensors = load_file(folder / "model.safetensors")
    changed(name, change)(tensors)
    save_file(tensors, folder / "model.safetensors")
    assert UP in refused(folder, error)


@pytest.mark.parametrize("size", [16, 33, 64, 0, -2, 2**40, "32", None, 1.5, True])
@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_another_group_size_than_the_scales_have(tmp_path: Path, method: str, size: object) -> None:
    settings, module = (AWQ, awq((96, 96), 32)) if method == "awq" else (GPTQ, gptq((96, 96), group=32))
    refused(write(tmp_path, settings | {"group_size": size}, {UP: module}), HeaderError)
