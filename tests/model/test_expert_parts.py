"""Experts taken apart: each alone is what it is among all."""

from pathlib import Path

import pytest
import torch

from offspec.model.loaded import LoadedModel
from offspec.stream.direct_reader import DirectReader
from offspec.stream.disk_stream import read_unit
from tests.support.expert_models import EXPERT_FAMILIES, write_experts
from tests.support.products import some
from tests.support.tiny_models import open_model


def check(model: LoadedModel) -> None:
    """Each expert beside the layer's parameters as they are made in one go; and that nothing is left out."""
    reader = DirectReader()
    whole, dense = dict[str, torch.Tensor](), set[str]()
    for binder, without in zip(model.layers, model.dense, strict=True):
        whole |= binder.realise(read_unit(binder.layout, reader).tensor)
        dense |= set(without.parameters)
    paths: dict[int, str] = {id(module): name for name, module in model.skeleton.model.named_modules()}
    apart, names = 0, set[str]()
    for found in model.experts.modules:
        for expert, unit in enumerate(found.units):
            memory = read_unit(unit.layout, reader).tensor
            unit.arrange(memory)
            made = unit.made(memory)
            for name, tensor in made.items():
                path = f"{paths[id(found.module)]}.{name}"
                names.add(path)
                assert tensor.dtype == whole[path].dtype and torch.equal(tensor, whole[path][expert])
            apart += 1
    assert apart == model.experts.count > 0
    assert names | dense == set(whole) and not names & dense
    reader.close()


@pytest.mark.parametrize("family", some(EXPERT_FAMILIES, "mixtral", "gpt_oss", "nemotron_h", one_in=2))
def test_an_expert_alone_is_what_it_is_among_all(family: str, tmp_path: Path) -> None:
    """As stored, and made into another dtype."""
    folder = write_experts(tmp_path / "model", family)
    for dtype in (torch.float32, torch.bfloat16):
        model = open_model(folder, dtype)
        check(model)
        model.close()


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_gates_and_ups_are_not_copied(family: str, tmp_path: Path) -> None:
    """Whether they are neighbours in the file, sorted by name, or come together once they are read."""
    folder = write_experts(tmp_path / "model", family)
    model, reader = open_model(folder), DirectReader()
    unit = model.experts.units[5]
    memory = read_unit(unit.layout, reader).tensor
    unit.arrange(memory)
    owner = memory.untyped_storage().data_ptr()
    assert all(tensor.untyped_storage().data_ptr() == owner for tensor in unit.made(memory).values())
    model.close()


def test_one_expert_that_is_all_there_are_stays_with_its_layer(tmp_path: Path) -> None:
    model = open_model(
        write_experts(tmp_path / "model", "mixtral", num_local_experts=1, num_experts_per_tok=1)
    )
    assert model.experts.count == 0 and model.experts.slot_bytes == 0
    assert all(dense is whole for dense, whole in zip(model.dense, model.layers, strict=True))
    model.close()
