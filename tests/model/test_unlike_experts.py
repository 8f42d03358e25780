"""Experts that are not alike, or not what the configuration says, are refused as the model is opened."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from offspec.core.errors import CheckpointError
from tests.support.tiny_models import open_model, write_model

_EXPERTS = "model.layers.0.mlp.experts"


def _shorter(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for found in [other for other in tensors if name in other]:
            tensors[found] = tensors[found][:-2].clone()

    return change


def _without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for found in [other for other in tensors if name in other]:
            del tensors[found]

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            _shorter("experts.1.down_proj"),
            r"1.down_proj.weight has shape \[30, 24\], but .* are alike",
        ),
        (_shorter("experts.1.up_proj"), r"experts.1.up_proj.weight has shape \[22, 32\], but .* are alike"),
        (_shorter(".down_proj"), r"config.json asks for \[4, 32, 24\]"),
        (_shorter(".gate_proj"), r"config.json asks for \[4, 48, 32\]"),
        (_without("experts.3."), r"of shape \[3, .*config.json asks for \[4, "),
    ],
)
def test_unlike_experts(tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], said: str) -> None:
    folder = write_model(tmp_path, "qwen3_moe", num_hidden_layers=1)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    assert f"{_EXPERTS}.1.down_proj.weight" in tensors
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=said) as raised:
        open_model(folder)
    assert "\n" not in str(raised.value)
