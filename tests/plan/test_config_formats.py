"""Size of a model's weights, computed from its configuration."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec.checkpoint.known_models import known_config
from offspec.plan.model_sizes import ConfigFormats, open_on_meta

EXPERTS, QUERY = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.self_attn.q_proj.weight"
STACK, MATRIX = (8, 256, 128), (256, 128)
FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": NVFP4}},
}


def bits(settings: Any, name: str, shape: tuple[int, ...]) -> float:
    """Return the bits per weight."""
    format = ConfigFormats(settings).of(name, shape)
    if format is None:
        return 16
    parts = format.parts(shape).values()
    return 8 * sum(prod(part.shape) * part.dtype.itemsize for part in parts) / prod(shape)


@pytest.mark.parametrize(
    ("settings", "experts", "query"),
    [
        (None, 16, 16),
        ({"quant_method": "mxfp4"}, 4.25, 16),
        (FP8, 8 + 32 / 128**2, 8 + 32 / 128**2),
        (FP8 | {"weight_block_size": None}, 8.25, 8.25),
        (FP8 | {"weight_block_size": "x"}, 8.25, 8.25),
        (FP8 | {"modules_to_not_convert": ["model.layers.1.self_attn"]}, 8 + 32 / 128**2, 16),
        (MODELOPT, 4.5, 4.5),
        (MODELOPT | {"exclude_modules": ["*self_attn*", "lm_head"]}, 4.5, 16),
        (MODELOPT | {"quant_algo": "FP8"}, 8.25, 8.25),
        (COMPRESSED | {"ignore": ["re:.*self_attn.*"]}, 4.5, 16),
        ({"quant_method": "awq", "bits": 4}, 4.5, 4.5),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5, 4.5),
        ("damaged", 16, 16),
    ],
)
def test_bits_of_a_weight(settings: Any, experts: float, query: float) -> None:
    assert bits(settings, EXPERTS, STACK) == experts
    assert bits(settings, QUERY, MATRIX) == query
    for name, shape in (("model.layers.1.mlp.gate.weight", MATRIX), ("model.layers.1.norm.weight", (256,))):
        assert bits(settings, name, shape) == 16


def test_experts_with_rows_shorter_than_a_block() -> None:
    assert bits(FP8, EXPERTS, (8, 192, 128)) == 8.25
    assert bits({"quant_method": "mxfp4"}, EXPERTS, (8, 48, 128)) == 16


@pytest.mark.parametrize(
    ("model", "settings", "published"),
    [
        ("openai/gpt-oss-120b", None, 65.2e9),  # bytes of the safetensors files
        ("Qwen/Qwen3-30B-A3B", FP8, 31.2e9),
    ],
)
def test_published_sizes(
    model: str, settings: dict[str, Any] | None, published: float, tmp_path: Path
) -> None:
    config = known_config(model)
    assert config is not None
    (tmp_path / "config.json").write_text(
        json.dumps(config if settings is None else {**config, "quantization_config": settings})
    )
    found, _ = open_on_meta(str(tmp_path), torch.bfloat16, torch.device("cpu"))
    total = sum(found.layer_bytes) + found.non_layer_bytes + found.embedding_bytes
    assert total == pytest.approx(published, rel=0.02)
