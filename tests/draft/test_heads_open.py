"""Opening what the user named as a head: which kind it is, if it is one."""

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec.core.errors import DraftError
from offspec.core.events import unheard
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


def test_an_ordinary_model_is_none(tmp_path: Path) -> None:
    assert open_for_tiny(write_model(tmp_path)) is None
    assert open_for_tiny(tmp_path / "model.safetensors") is None


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "bert", "architectures": ["BertForSequenceClassification"]},
        {"model_type": "unheard_of", "architectures": ["UnheardOfForCausalLM"]},
    ],
)
def test_what_the_way_of_models_explains_better_is_none(tmp_path: Path, config: dict[str, Any]) -> None:
    tensors = {"classifier.weight": torch.zeros(2, 4)}
    assert open_for_tiny(write_head(tmp_path / "safe", config, tensors)) is None
    assert open_for_tiny(write_head(tmp_path / "pickled", config, tensors, "pytorch_model.bin")) is None


def test_nothing_and_what_is_no_head_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert open_for_tiny(tmp_path / "a.gguf") is None
    assert open_for_tiny(tmp_path) is None
    assert open_for_tiny(tmp_path / "absent") is None
    for name in ("demo", "", "substitute"):
        assert open_head(name, target_shape(), unheard) is None


def test_an_adapter_is_none(tmp_path: Path) -> None:
    write_head(tmp_path, None, {"lora_A.weight": torch.zeros(2, 4)}, "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    assert open_for_tiny(tmp_path) is None


@pytest.mark.parametrize("config", [{"model_type": "hydra"}, {"hidden_size": 32}, None])
def test_an_unknown_kind_lists_those_that_are_known(tmp_path: Path, config: dict[str, Any] | None) -> None:
    error = opening_fails(write_head(tmp_path, config, {"prefix.mystery": torch.zeros(2, 4)}))
    assert isinstance(error, DraftError)
    for word in (
        "prefix.mystery",
        "Medusa",
        "MLPSpeculator",
        "EAGLE",
        "hydra" if config == {"model_type": "hydra"} else "no model_type",
    ):
        assert word in str(error)


@pytest.mark.parametrize("key", ["model_type", "architectures", "speculators_model_type"])
@pytest.mark.parametrize("value", [[], [[[1]]], {"a": 1}, 3, "a\nb" * 999])
def test_a_kind_of_another_sort_is_refused_in_a_line(tmp_path: Path, key: str, value: Any) -> None:
    error = opening_fails(write_head(tmp_path, {key: value}, {"prefix.mystery": torch.zeros(2, 4)}))
    assert isinstance(error, DraftError) and len(str(error)) < 500


@pytest.mark.parametrize("name", ["a\nb\x1b[31m", "a" * 9999, "a\ud800b"])
def test_names_of_tensors_are_shown_as_they_can_be_printed(tmp_path: Path, name: str) -> None:
    error = str(opening_fails(write_head(tmp_path, {}, {name: torch.zeros(2)}, "head.pt")))
    assert error.isprintable() and error.encode() and len(error) < 500


def test_a_file_without_tensors(tmp_path: Path) -> None:
    assert "holds no tensors" in str(opening_fails(write_head(tmp_path, {"model_type": "hydra"}, {})))


@pytest.mark.parametrize(
    ("config", "files"),
    [
        (MEDUSA_CONFIG, ["medusa_lm_head.pt"]),
        (mlp_config(), ["model.safetensors"]),
        ({"model_type": "medusa"}, ["model.safetensors"]),
        # Of yuhuili/EAGLE-LLaMA3-Instruct-8B, and of EAGLE3-LLaMA3.1-Instruct-8B by the same authors.
        ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}, ["pytorch_model.bin"]),
        ({"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000}, ["pytorch_model.bin"]),
        ({"architectures": "Eagle3Speculator", "speculators_model_type": "eagle3"}, ["model.safetensors"]),
        ({}, ["medusa_lm_head.safetensors"]),
    ],
)
def test_what_is_worth_fetching(config: dict[str, Any], files: list[str]) -> None:
    assert may_be_head(config, [*files, "config.json", "README.md"])


def test_models_are_not_fetched_as_heads() -> None:
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 28}
    assert not may_be_head(config, ["config.json", "model.safetensors", "tokenizer.json"])
