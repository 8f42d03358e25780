"""Fixtures for tests that unpack GGUF files."""

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.checkpoint.gguf_families import tiny_model
from tests.checkpoint.gguf_files import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "tiny.gguf", tmp_path / "cache", [])


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    return tiny_model("llama")
