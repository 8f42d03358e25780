"""Fixtures for tests of the hub and of GGUF files."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.support.fake_hub import FakeHub, serve
from tests.support.gguf_families import tiny_model
from tests.support.gguf_files import UnpackEnvironment


@pytest.fixture(scope="module")
def server() -> Iterator[FakeHub]:
    with serve(FakeHub()) as standin:
        yield standin


@pytest.fixture
def bench(tmp_path: Path) -> UnpackEnvironment:
    return UnpackEnvironment(tmp_path / "tiny.gguf", tmp_path / "cache", [])


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    return tiny_model("llama")
