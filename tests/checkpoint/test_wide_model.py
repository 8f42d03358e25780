"""A widened model has the output of the small one, and its weights, exactly scaled."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from bench.lib.widen import widen
from offspec.checkpoint import open_checkpoint
from offspec.checkpoint.wide_model import RECIPE
from offspec.checkpoint.wide_tensors import divide, wide_config, wide_files
from offspec.core.errors import RequestError, UnsupportedModelError
from tests.support.bench_models import load_model, logits, make_model


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small"
    make_model(folder)
    return folder


@pytest.mark.parametrize(
    ("family", "factor", "settings"),
    [
        ("llama", 4, {"attention_bias": True, "mlp_bias": True}),
        ("llama", 2, {"tie_word_embeddings": False}),
        ("qwen2", 2, {}),
        ("qwen3", 1, {}),
        ("mistral", 4, {}),
        ("smollm3", 2, {}),
    ],
)
def test_same_logits(tmp_path: Path, family: str, factor: int, settings: dict[str, bool]) -> None:
    model = make_model(tmp_path / "small", family, **settings)
    widen(open_checkpoint(str(tmp_path / "small")), tmp_path / "wide", factor)
    wide = load_model(tmp_path / "wide")
    assert wide.config.hidden_size == 24 * factor
    assert wide.lm_head.weight.data_ptr() != wide.get_input_embeddings().weight.data_ptr()
    expected = logits(model)
    assert expected.std() > 0.3  # far above the tolerance
    torch.testing.assert_close(logits(wide), expected, rtol=1e-5, atol=1e-5)


def test_bfloat16_weights_are_exact(tmp_path: Path) -> None:
    model = make_model(tmp_path / "small", dtype=torch.bfloat16)
    widen(open_checkpoint(str(tmp_path / "small")), tmp_path / "wide", 4)
    weights = {
        key: value
        for file in sorted((tmp_path / "wide").glob("*.safetensors"))
        for key, value in load_file(file).items()
    }
    for name, original in model.state_dict().items():
        wide = weights.pop(name)
        assert wide.dtype == torch.bfloat16
        scale = 1 if original.ndim == 1 or "embed" in name else 4
        repeats = [wide.shape[axis] // original.shape[axis] for axis in range(original.ndim)]
        assert repeats == ([4] if original.ndim == 1 else [1, 4] if original.shape[0] == 61 else [4, 4])
        assert torch.equal(wide * scale, original.repeat(*repeats)), name
    assert not weights


def test_layout_on_disk(small: Path, tmp_path: Path) -> None:
    (small / "tokenizer.json").write_text("{}")
    out = tmp_path / "wide"
    widen(open_checkpoint(str(small)), out, 2)
    assert sorted(file.name for file in out.glob("*.safetensors")) == [
        "model-layer-000.safetensors",
        "model-layer-001.safetensors",
        "model-outer.safetensors",
    ]
    recipe = json.loads((out / RECIPE).read_text())
    layer_bytes = 0
    for file in out.glob("*.safetensors"):
        header = int.from_bytes(file.read_bytes()[:8], "little")
        assert (8 + header) % 4096 == 0
        assert file.stat().st_blocks * 512 >= file.stat().st_size  # no holes
        layer_bytes += file.stat().st_size - 8 - header if "layer" in file.name else 0
    assert recipe["layer_bytes"] == layer_bytes
    with safe_open(out / "model-outer.safetensors", "pt") as outer:
        assert sorted(outer.keys()) == ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == recipe["total_bytes"]
    assert (out / "tokenizer.json").read_text() == "{}"
    assert (out / "generation_config.json").exists()
    assert not list(tmp_path.glob(".*"))


def test_error_leaves_no_files(small: Path, tmp_path: Path) -> None:
    def stop(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        widen(open_checkpoint(str(small)), tmp_path / "wide", 2, on_write=stop)
    assert not list(tmp_path.iterdir())


def test_unsupported_models_are_refused(small: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(small))
    with pytest.raises(UnsupportedModelError, match="gemma2"):
        wide_files(replace(checkpoint, config={**checkpoint.config, "model_type": "gemma2"}), 2)
    name = "model.layers.0.self_attn.q_proj.weight"
    odd = {**checkpoint.tensors, "model.layers.0.gate": checkpoint.tensors[name]}
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0\.gate"):
        wide_files(replace(checkpoint, tensors=odd), 2)
    why = r"a power of two \(1, 2, 4, …\), so that weights stay exact, not 3"
    with pytest.raises(RequestError, match=why):
        wide_files(checkpoint, 3)
    with pytest.raises(RequestError, match="exists already"):
        widen(checkpoint, tmp_path, 2)


def test_inexact_division_is_refused() -> None:
    assert divide(np.array([0x3F80], np.uint16), 4, "one")[0] == 0x3E80  # bfloat16 1.0 -> 0.25
    for values in (
        np.array([0x0001], np.uint16),  # the smallest bfloat16
        np.array([0x7F80], np.uint16) | 1,  # not a number
        np.array([6e-8], np.float16),
        np.array([1e-45], np.float32),
    ):
        with pytest.raises(UnsupportedModelError, match="tiny"):
            divide(values, 4, "tiny")


def test_head_dim_is_written_out() -> None:
    config = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    }
    wide = wide_config(config, 4)
    assert (wide["head_dim"], wide["num_attention_heads"], wide["num_key_value_heads"]) == (64, 36, 12)
