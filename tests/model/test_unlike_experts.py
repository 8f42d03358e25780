"""Experts that are not alike, or not what the configuration says, are refused as the model is opened."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from offspec.core.errors import CheckpointError
from tests.support.tiny_models import open_model, write_model


@pytest.mark.parametrize(
    ("name", "kept", "said"),
    [
        ("experts.1.down_proj", -2, r"1.down_proj.weight has shape \[30, 24\], but .* are alike"),
        ("experts.1.up_proj", -2, r"experts.1.up_proj.weight has shape \[22, 32\], but .* are alike"),
        (".down_proj", -2, r"config.json asks for \[4, 32, 24\]"),
        (".gate_proj", -2, r"config.json asks for \[4, 48, 32\]"),
        ("experts.3.", 0, r"of shape \[3, .*config.json asks for \[4, "),
    ],
)
def test_unlike_experts(tmp_path: Path, name: str, kept: int, said: str) -> None:
    folder = write_model(tmp_path, "qwen3_moe", num_hidden_layers=1)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    changed = [other for other in tensors if name in other]
    assert changed
    for each in changed:
        tensors[each] = tensors[each][:kept].clone()
        if not kept:
            del tensors[each]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=said) as raised:
        open_model(folder)
    assert "\n" not in str(raised.value)
