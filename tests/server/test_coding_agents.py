"""Codex and Claude Code, run as users do, with the settings of docs/clients.md: they call a tool.

`make test-clients` installs both; otherwise these tests are skipped.
"""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_engine import ScriptedEngine
from tests.support.live_server import NAME, LiveServer
from tests.support.waiting import PATIENCE

MODULES = Path(os.environ.get("OFFSPEC_AGENTS") or Path(sys.prefix) / "agents") / "node_modules"
PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
QUESTION = "Why is the sky blue? Answer in one sentence."
COMMAND = "echo done > made.txt && echo written"
ENDED = "I made the file."
MINUTES = 15 * PATIENCE  # for a real model on a busy machine

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not MODULES.is_dir(), reason="make test-clients installs the agents"
)
Run = subprocess.CompletedProcess[str]
Event = dict[str, Any]


def settings(section: str, language: str, server: LiveServer) -> str:
    """Return a code block from a section of the page, with a server's address and the name of its model."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    found = re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return found[1].replace("http://127.0.0.1:8000", server.url).replace("qwen", NAME)


def run(command: list[str], home: Path, seconds: float, **variables: str) -> tuple[Run, list[Event]]:
    """Run an agent in a folder of its own; return the result and the events printed, one per line."""
    (work := home / "work").mkdir()
    given = {"PATH": os.environ["PATH"], "HOME": str(home), **variables}
    done = subprocess.run(
        ["node", *command],
        cwd=work,
        env=given,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    return done, [json.loads(line) for line in done.stdout.splitlines()]


def codex(
    server: LiveServer, home: Path, question: str, seconds: float = PATIENCE
) -> tuple[Run, list[Event]]:
    (folder := home / ".codex").mkdir()
    (folder / "config.toml").write_text(settings("Codex", "toml", server))
    program = str(MODULES / "@openai" / "codex" / "bin" / "codex.js")
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--strict-config"]
    return run([program, "exec", "--json", *flags, question], home, seconds, OFFSPEC_API_KEY="none")


def claude(
    server: LiveServer, home: Path, question: str, *more: str, seconds: float = PATIENCE
) -> tuple[Run, list[Event]]:
    program = str(MODULES / "@anthropic-ai" / "claude-code" / "cli-wrapper.cjs")
    flags = ["--output-format", "stream-json", "--verbose", "--allowedTools", "Bash", *more]
    lines = settings("Claude Code", "sh", server).splitlines()
    variables = dict(line.removeprefix("export ").split("=", 1) for line in lines)
    return run([program, "-p", *flags, "--", question], home, seconds, **variables)


def texts_of_codex(done: Run, events: list[Event]) -> list[str]:
    """Messages from Codex, which may warn only about an unknown model."""
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    errors = [item["message"] for item in items if item["type"] == "error"]
    assert len(errors) == 1 and errors[0].startswith(f"Model metadata for `{NAME}` not found"), done
    return [item["text"] for item in items if item["type"] == "agent_message"]


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(template="</think> <tool_call>", context=65536)


@pytest.fixture
def scripted(
    served: LiveServer, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> Iterator[Callable[[str, dict[str, str]], None]]:
    """Return a function that scripts a tool call and an end; fails if the server ignored a field."""

    def script(tool: str, arguments: dict[str, str]) -> None:
        call = json.dumps({"name": tool, "arguments": arguments})
        engine.answers = [f"<think>\nHm.\n</think>\n\nI call.\n\n<tool_call>\n{call}\n</tool_call>", ENDED]
        engine.requests.clear()

    with caplog.at_level(logging.INFO, "offspec.server"):
        yield script
    assert not [message for message in caplog.messages if "ignored" in message]


def test_codex(
    served: LiveServer,
    engine: ScriptedEngine,
    scripted: Callable[[str, dict[str, str]], None],
    tmp_path: Path,
) -> None:
    scripted("exec_command", {"cmd": COMMAND})
    done, events = codex(served, tmp_path, "Make the file.")
    assert done.returncode == 0, done
    assert texts_of_codex(done, events) == ["I call.", ENDED]
    assert [event["type"] for event in events][-1] == "turn.completed"
    assert (tmp_path / "work" / "made.txt").read_text() == "done\n"
    assert len(engine.requests) == 2 and "written\n" in engine.decode_with_special(engine.requests[1].prompt)


def test_claude_code(
    served: LiveServer,
    engine: ScriptedEngine,
    scripted: Callable[[str, dict[str, str]], None],
    tmp_path: Path,
) -> None:
    scripted("Bash", {"command": COMMAND, "description": "Makes a file"})
    done, events = claude(served, tmp_path, "Make the file.")
    assert done.returncode == 0, done
    last = events[-1]
    assert (last["type"], last["is_error"], last["result"], last["num_turns"]) == ("result", False, ENDED, 2)
    assert last["modelUsage"].keys() == {NAME} and last["modelUsage"][NAME]["contextWindow"] == 65536
    assert last["usage"]["cache_read_input_tokens"] > 0
    assert (tmp_path / "work" / "made.txt").read_text() == "done\n"
    assert len(engine.requests) == 2 and "<|tool|>written" in engine.decode_with_special(
        engine.requests[1].prompt
    )


@pytest.fixture(scope="module")
def demo() -> Iterator[LiveServer]:
    from offspec import load

    with LiveServer(load("demo", context=8192)) as server:
        yield server


@pytest.mark.slow
def test_codex_with_a_real_model(demo: LiveServer, tmp_path: Path) -> None:
    """The answer is nonsense, and may fill the context."""
    done, events = codex(demo, tmp_path, QUESTION, MINUTES)
    assert "".join(texts_of_codex(done, events)).strip()
    errors = [event["message"] for event in events if event["type"] == "error"]
    assert not errors or errors == ["Incomplete response returned, reason: max_output_tokens"]
    assert done.returncode == (1 if errors else 0)


@pytest.mark.slow
def test_claude_code_with_a_real_model(
    demo: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys.modules[__name__], "PAGE", PAGE.replace("OUTPUT_TOKENS=8192", "OUTPUT_TOKENS=100")
    )
    # With all tools its prompt is longer than the context.
    done, events = claude(demo, tmp_path, QUESTION, "--tools", "Bash", seconds=MINUTES)
    assert done.returncode == 0 and events[-1]["is_error"] is False and events[-1]["result"].strip(), done
