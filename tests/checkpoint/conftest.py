"""Fixtures for tests of the hub and of GGUF files."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.support.gguf_families import tiny_model
from tests.support.gguf_files import Bench
from tests.support.hub_standin import StandIn, serve


@pytest.fixture(scope="module")
def server() -> Iterator[StandIn]:
    with serve(StandIn()) as standin:
        yield standin


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "tiny.gguf", tmp_path / "cache", [])


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    return tiny_model("llama")
