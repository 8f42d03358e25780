"""A tokenizer that loads and panics later: every interface prints one line and continues."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
from textual.pilot import Pilot
from typer.testing import CliRunner, Result

from offspec.chat.archive import SessionArchive
from offspec.core.config import EngineConfig
from offspec.core.sampling_defaults import SamplingOverrides
from offspec.ui.chat.setup import ChatSetup
from offspec.ui.tui.app import ChatApp
from tests.support.live_server import NAME, LiveServer
from tests.support.tiny_models import tiny_engine, write_model
from tests.support.waiting import PATIENCE
from tests.ui.tui.stage import loaded, play, seen, send, until

ENGINE = ("--memory", "2GB", "--context", "128", "--draft", "none", "--dtype", "float32", "--quiet")
BROKEN, WHOLE = "w13 w5", "w5 w6"
Break = Callable[[], None]


class PanicException(BaseException):
    """As defined by pyo3."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("whole") / "model", num_hidden_layers=2)


@pytest.fixture(params=["encoding", "decoding"])
def fail(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Break:
    """Make every tokenizer panic: at texts with w13, or at the second token of an answer."""
    from transformers import PreTrainedTokenizerBase

    name = {"encoding": "__call__", "decoding": "decode"}[request.param]
    whole: Any = getattr(PreTrainedTokenizerBase, name)

    def failing(self: object, given: str | Sequence[int], **more: Any) -> Any:
        if "w13" in given if isinstance(given, str) else len(given) > 1:
            raise PanicException("index out of bounds:\nthe len is 1")
        return whole(self, given, **more)

    return lambda: monkeypatch.setattr(PreTrainedTokenizerBase, name, failing)


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("CACHE", "DATA"):
        monkeypatch.setenv(f"OFFSPEC_{place}", str(tmp_path / place))


def call(*args: object, input: str | None = None) -> Result:
    from offspec.ui.cli.main import app

    return CliRunner().invoke(app, [*map(str, args), *ENGINE], input=input, prog_name="offspec")


def complaints(result: Result) -> list[str]:
    """Return the lines on stderr, all of which are errors."""
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    lines = result.stderr.splitlines()
    assert all("cannot " in line and "index out of bounds: the len is 1" in line for line in lines), lines
    return lines


@pytest.mark.parametrize("command", [("generate",), ("plan",), ("chat", "--plain")])
def test_real_panic(model: Path, tmp_path: Path, command: tuple[str, ...]) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    file = folder / "tokenizer.json"
    wants_a_second_text = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "B", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {},
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": wants_a_second_text}))
    said = {"generate": ["w5"], "plan": [], "chat": []}[command[0]]
    result = call(command[0], folder, *said, *command[1:], input="w5\n")
    assert result.exit_code == 1 and not result.stdout
    (line,) = complaints(result)
    assert line.startswith("error: the tokenizer in ") and line.endswith("; download it again")


def test_commands(model: Path, fail: Break) -> None:
    """An answer ends, and the line-mode chat continues."""
    fail()
    result = call("generate", model, BROKEN)
    assert (result.exit_code, len(complaints(result))) == (1, 1)
    result = call("chat", model, "--plain", "--max-tokens", "4", input=f"{BROKEN}\n{BROKEN}\n")
    assert (result.exit_code, len(complaints(result))) == (1, 2)


def test_terminal_chat_continues(model: Path, tmp_path: Path, fail: Break) -> None:
    def opener(config: EngineConfig, plan: Path | None, notify: object) -> Any:
        return tiny_engine(model, "none")

    app = ChatApp(
        ChatSetup(EngineConfig(model=str(model)), SamplingOverrides({"max_tokens": 4})),
        opener,
        SessionArchive(tmp_path),
    )

    async def scene(pilot: Pilot[None]) -> None:
        await loaded(pilot)
        assert app.controller is not None
        session = app.controller.session
        fail()
        await send(pilot, BROKEN)
        await until(pilot, lambda: "index out of bounds: the len is 1" in seen(app))
        await until(pilot, lambda: not session.busy and app.answer is None)
        await send(pilot, "/clear")
        await until(pilot, lambda: "index out of bounds" not in seen(app))

    play(app, scene)


def test_server_continues(model: Path, fail: Break, request: pytest.FixtureRequest) -> None:
    stream = "decoding" in request.node.name
    fields = {"model": NAME, "max_tokens": 4, "stream": stream, "ignore_eos": True}
    with LiveServer(tiny_engine(model, "none")) as server:
        fail()
        address = f"{server.url}/v1/completions"
        answer = httpx2.post(address, json=fields | {"prompt": BROKEN}, timeout=PATIENCE)
        assert answer.status_code == (200 if "data: {" in answer.text else 500)
        said = answer.text.rpartition("data: {")[2] or answer.text
        assert "see the server's log" in said and "index out of bounds" not in answer.text
        one = {"max_tokens": 1}
        assert (
            httpx2.post(address, json=fields | one | {"prompt": WHOLE}, timeout=PATIENCE).status_code == 200
        )
