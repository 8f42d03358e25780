"""Opening a draft as a head: recognition of its kind."""

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec.core.errors import DraftError
from offspec.core.events import ignore_event
from offspec.draft.heads.open import may_be_head, open_head
from tests.support.heads_files import (
    MEDUSA_CONFIG,
    mlp_config,
    open_for_tiny,
    opening_fails,
    target_shape,
    write_head,
)
from tests.support.tiny_models import write_model


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("what is on disk needs no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_other_files_are_not_heads(tmp_path: Path) -> None:
    """A model, an adapter, a missing path: opening them as a model gives a better message."""
    model = write_model(tmp_path / "model")
    assert open_for_tiny(model) is None and open_for_tiny(model / "model.safetensors") is None
    for config in (
        {"model_type": "bert", "architectures": ["BertForSequenceClassification"]},
        {"model_type": "unheard_of", "architectures": ["UnheardOfForCausalLM"]},
    ):
        tensors, kind = {"classifier.weight": torch.zeros(2, 4)}, config["model_type"]
        assert open_for_tiny(write_head(tmp_path / f"{kind} safe", config, tensors)) is None
        file = "pytorch_model.bin"
        assert open_for_tiny(write_head(tmp_path / f"{kind} pickled", config, tensors, file)) is None
    adapter = tmp_path / "adapter"
    write_head(adapter, None, {"lora_A.weight": torch.zeros(2, 4)}, "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text("{}")
    assert open_for_tiny(adapter) is None
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    (tmp_path / "bare").mkdir()
    for name in ("a.gguf", "bare", "absent"):
        assert open_for_tiny(tmp_path / name) is None
    for name in ("demo", "", "self"):
        assert open_head(name, target_shape(), ignore_event) is None


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "hydra"}, "hydra"),
        (None, "no model_type"),
        ({"model_type": ["a"]}, "no model_type"),
        ({"architectures": {"a": 1}}, "no model_type"),
        ({"speculators_model_type": "a\nb" * 999}, "is not known"),
    ],
)
def test_unknown_kind_lists_the_known_ones(tmp_path: Path, config: dict[str, Any] | None, said: str) -> None:
    error = opening_fails(write_head(tmp_path, config, {"prefix.mystery": torch.zeros(2, 4)}))
    assert isinstance(error, DraftError) and len(str(error)) < 500
    for word in ("prefix.mystery", "Medusa", "MLPSpeculator", "EAGLE", said):
        assert word in str(error)


@pytest.mark.parametrize("name", ["a\nb\x1b[31m", "a" * 9999, "a\ud800b"])
def test_tensor_names_are_printed_safely(tmp_path: Path, name: str) -> None:
    error = str(opening_fails(write_head(tmp_path, {}, {name: torch.zeros(2)}, "head.pt")))
    assert error.isprintable() and error.encode() and len(error) < 500


def test_file_without_tensors(tmp_path: Path) -> None:
    assert "holds no tensors" in str(opening_fails(write_head(tmp_path, {"model_type": "hydra"}, {})))


@pytest.mark.parametrize(
    ("config", "files"),
    [
        (MEDUSA_CONFIG, ["medusa_lm_head.pt"]),
        (mlp_config(), ["model.safetensors"]),
        ({"model_type": "medusa"}, ["model.safetensors"]),
        # As in yuhuili/EAGLE-LLaMA3-Instruct-8B, and in EAGLE3-LLaMA3.1-Instruct-8B by the same authors.
        ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}, ["pytorch_model.bin"]),
        ({"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000}, ["pytorch_model.bin"]),
        ({"architectures": "Eagle3Speculator", "speculators_model_type": "eagle3"}, ["model.safetensors"]),
        ({}, ["medusa_lm_head.safetensors"]),
    ],
)
def test_downloads_of_possible_heads(config: dict[str, Any], files: list[str]) -> None:
    assert may_be_head(config, [*files, "config.json", "README.md"])
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 28}
    assert not may_be_head(config, ["config.json", "model.safetensors", "tokenizer.json"])
