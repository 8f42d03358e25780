"""A server with a tiny real model, and the same engine without a server.

Both end with each test file, because other tests check for leftover threads.
"""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from offspec.engine.engine import Engine
from tests.support.browser import Browser
from tests.support.fake_engine import ScriptedEngine
from tests.support.live_server import LiveServer
from tests.support.tiny_models import tiny_engine, write_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    write_model(folder, "llama")
    return folder


@pytest.fixture(scope="module")
def live(tiny_folder: Path) -> Iterator[LiveServer]:
    with LiveServer(tiny_engine(tiny_folder)) as server:
        yield server


@pytest.fixture(scope="module")
def alone(tiny_folder: Path) -> Iterator[Engine]:
    """The same model without a server or a draft."""
    with tiny_engine(tiny_folder, "none") as engine:
        yield engine


@pytest.fixture
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with live.client() as client:
        yield client


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    """An engine with answers set by the test, and a template with reasoning and tool calls."""
    return ScriptedEngine(template="</think> <tool_call>")


@pytest.fixture(scope="module")
def served(engine: ScriptedEngine) -> Iterator[LiveServer]:
    with LiveServer(engine) as server:
        yield server


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser
