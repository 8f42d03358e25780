"""`offspec serve` as a program: output, signals and exit codes."""

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
from typer.testing import Result

from offspec.core.errors import CapacityError
from tests.support.fake_engine import ScriptedLoad
from tests.support.waiting import PATIENCE, wait_until
from tests.ui.cli.program import ENDLESS, Child, error_line, start

ASKED = {"model": "demo", "messages": [{"role": "user", "content": "Why?"}]}
CHAT = "/v1/chat/completions"


def _serving(program: Child[str]) -> httpx2.Client:
    """A client, once the server listens."""
    assert program.stderr
    for line in iter(program.stderr.readline, ""):
        if found := re.search(r"listening on (http://[\d.]+:\d+)", line):
            return httpx2.Client(base_url=found[1], trust_env=False, timeout=PATIENCE)
    raise AssertionError("it ended, or did not listen within a minute")


def _until_ready(http: httpx2.Client) -> None:
    wait_until(lambda: http.get("/health").status_code == 200)


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_stops_the_server(sent: signal.Signals, code: int) -> None:
    with start("serve", "demo", "--port", "0", "--alias", "mine") as program, _serving(program) as http:
        _until_ready(http)
        answer = http.post(CHAT, json={**ASKED, "model": "mine"}).json()
        assert answer["choices"][0]["message"]["content"] == "The sky is truly blue [really]."
        models = http.get("/v1/models").json()["data"]
        assert [each["id"] for each in models] == ["mine", "demo"]
        assert models[0]["default_sampling"] == {"temperature": 0.0}
        program.send_signal(sent)
        out, err = program.communicate(timeout=PATIENCE)
    assert (program.returncode, out) == (code, "")
    assert err.count(f"POST {CHAT} 200") == 1 and "[engine closed]" in err
    assert "Traceback" not in err and "Aborted" not in err and "warning" not in err


def test_second_signal_stops_immediately() -> None:
    script = {**ENDLESS, "patience": PATIENCE}
    with start("serve", "demo", "--port", "0", script=script) as program, _serving(program) as http:
        _until_ready(http)
        with http.stream("POST", CHAT, json={**ASKED, "stream": True}) as answer:
            next(answer.iter_bytes())
            program.send_signal(signal.SIGTERM)
            assert program.stderr
            assert any("stopping" in line for line in iter(program.stderr.readline, ""))
            program.send_signal(signal.SIGTERM)
            _, err = program.communicate(timeout=PATIENCE)
    assert program.returncode == 143 and "[engine closed]" not in err and "Traceback" not in err


def test_second_signal_leaves_no_partial_files(tmp_path: Path) -> None:
    """Like the first signal, even while a model is being written."""
    folder = tmp_path / "half"
    code = f"""
from pathlib import Path
from types import SimpleNamespace
from offspec.core.files import removed_on_exit
from offspec.server.run import Server
folder = Path({str(folder)!r})
with removed_on_exit(folder):
    folder.mkdir()
    Server.handle_exit(SimpleNamespace(signal=15), 15, None)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE).returncode == 143
    assert not folder.exists()


def test_signal_while_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        start("serve", "demo", "--port", "0", script={"load_delay": 60}) as program,
        _serving(program) as http,
    ):
        assert http.get("/health").json()["status"] == "loading"
        program.send_signal(signal.SIGINT)
        _, err = program.communicate(timeout=PATIENCE)
    assert program.returncode == 130 and "Traceback" not in err


@pytest.mark.parametrize(
    ("option", "size"), [((), 4 * 10**9), (("--cache-size", "1MB"), 10**6), (("--cache-size=0",), 0)]
)
def test_conversations_are_stored_unless_disabled(
    option: tuple[str, ...], size: int, offspec: Callable[..., Result], load: ScriptedLoad
) -> None:
    load.fail = CapacityError("it does not fit", needed=2, given=1)
    result = offspec("serve", "demo", "--port", "0", "--quiet", *option)
    assert result.exit_code == 1 and error_line(result) == "error: it does not fit"
    assert load.calls[-1][0].cache_size == size


@pytest.mark.parametrize("key", ["", "k"])
def test_warning_without_a_key(
    key: str, offspec: Callable[..., Result], load: ScriptedLoad, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFSPEC_API_KEY", key)
    load.fail = CapacityError("it does not fit", needed=2, given=1)
    result = offspec("serve", "demo", "--port", "0", "--host", "0.0.0.0", "--quiet")
    assert ("warning" in result.stderr and "OFFSPEC_API_KEY" in result.stderr) == (not key)


@pytest.mark.parametrize("key", ["", "k"])
def test_warning_for_any_origin(
    key: str, offspec: Callable[..., Result], load: ScriptedLoad, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFSPEC_API_KEY", key)
    load.fail = CapacityError("it does not fit", needed=2, given=1)
    result = offspec("serve", "demo", "--port", "0", "--cors-origin", "*", "--quiet")
    assert ("any web page" in result.stderr and "--cors-origin" in result.stderr) == (not key)


def test_port_in_use(offspec: Callable[..., Result], load: ScriptedLoad) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = offspec("serve", "demo", "--port", str(port))
    assert result.exit_code == 2
    assert error_line(result).startswith(f"error: cannot listen on 127.0.0.1:{port}: ")
    assert not load.calls


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (("--api-key", "two words"), "--api-key must be"),
        (("--host", "no.such.host.invalid"), "cannot listen on no.such.host.invalid"),
        (("--temperature", "-1"), "temperature must be"),
        (("--cors-origin", "localhost:3000"), "--cors-origin must be scheme://host[:port]"),
    ],
)
def test_invalid_options(offspec: Callable[..., Result], args: tuple[str, ...], error: str) -> None:
    result = offspec("serve", "demo", "--port", "0", *args)
    assert result.exit_code == 2 and error in error_line(result)


def test_missing_extra(offspec: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    from offspec.ui.cli import serve

    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    result = offspec("serve", "demo")
    assert result.exit_code == 2 and "pip install '.[serve]'" in error_line(result)
