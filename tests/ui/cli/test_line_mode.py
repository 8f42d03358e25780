"""Line mode: through pipes in this process, and as a program at a terminal, over a scripted engine."""

import base64
import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offspec.chat.archive import SessionArchive
from offspec.core.config import SamplingParams
from offspec.core.file_lock import Claim
from offspec.ui.cli import chat, checks
from offspec.ui.cli.main import app
from tests.support.fake_engine import Script, ScriptedEngine, ScriptedLoad
from tests.support.waiting import PATIENCE, wait_until
from tests.ui.cli.program import DRIVER, ROOT, Child

ANSWER = "The sky is blue because of scattering."


class Program:
    """`offspec chat demo`, with its data in a folder of the test."""

    def __init__(self, folder: Path) -> None:
        self.archive = SessionArchive(folder / "sessions")
        self.environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "OFFSPEC_DATA": str(folder),
            "PYTHONIOENCODING": "utf-8",
            "TERM": "xterm-256color",
            "COLUMNS": "100",
            "NO_COLOR": "1",
        }

    def start(self, *options: str, script: dict[str, Any] | None = None, **kwargs: Any) -> Child[bytes]:
        """Start it in a process of its own."""
        script = {"answers": [ANSWER], **(script or {})}
        command = [sys.executable, "-m", DRIVER, json.dumps(script), "chat", "demo", *options]
        ends = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **kwargs}
        return Child(command, cwd=ROOT, env=self.environment, **ends)

    def pipe(
        self,
        text: str | bytes,
        *options: str,
        script: Script | str = ANSWER,
        own: SamplingParams | None = None,
        **loading: Any,
    ) -> tuple[str, str, int]:
        """Run it in this process; return stdout, stderr and the exit code.

        script: the first answer; later ones are ANSWER. own: the model's sampling defaults.
        """
        load = ScriptedLoad(ScriptedEngine([script, *[ANSWER] * 9]), **loading)
        load.engine.sampling_defaults = own or SamplingParams()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chat, "open_engine", load)
            patch.setattr(
                checks, "check_files", lambda config, plan=None: None
            )  # the named files do not exist
            for name in ("OFFSPEC_DATA", "COLUMNS", "NO_COLOR"):
                patch.setenv(name, self.environment[name])
            done = CliRunner().invoke(app, ["chat", "demo", *options], input=text, prog_name="offspec")
        self.loads = len(load.calls)
        return done.stdout, done.stderr, done.exit_code

    def questions(self, name: str = "") -> list[str]:
        """Questions of a conversation, by default the only one."""
        (entry,) = [entry for entry in self.archive.list() if name in ("", entry.title)]
        messages = json.loads(entry.file.read_text())["messages"]
        return [message["content"] for message in messages if message["role"] == "user"]


@pytest.fixture
def offspec(tmp_path: Path) -> Program:
    return Program(tmp_path)


class Terminal:
    """The program at a terminal; its output is collected in `seen`."""

    def __init__(
        self, offspec: Program, *options: str, script: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._ours, theirs = pty.openpty()
        ends = {"stdin": theirs, "stdout": theirs, "stderr": theirs, **kwargs}
        self.program = offspec.start(*options, script=script, **ends)
        os.close(theirs)
        self.seen = ""
        self._found = 0

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def answer_prompt(self, text: str) -> None:
        self.wait_for("> ")
        self.type(text)

    def wait_for(self, pattern: str) -> str:
        """Read until the pattern appears after the text found by earlier waits; return the match."""
        while not (match := re.search(pattern, self.seen[self._found :])):
            self._read()
        self._found += match.end()
        return match[0]

    def leave(self) -> int:
        """Read to the end; return the exit code."""
        with contextlib.suppress(OSError):  # the other end is closed
            while True:
                self._read()
        return self.program.wait(PATIENCE)

    def _read(self) -> None:
        ready, _, _ = select.select([self._ours], [], [], PATIENCE)
        assert ready, f"nothing more came after {self.seen[-2000:]!r}"
        data = os.read(self._ours, 4096)
        if not data:
            raise OSError("closed")
        self.seen += data.decode(errors="replace")

    def close(self) -> None:
        if self.program.poll() is None:
            self.program.kill()
        self.program.wait()
        for stream in (self.program.stdin, self.program.stdout, self.program.stderr):
            if stream is not None:
                stream.close()
        os.close(self._ours)


@pytest.fixture
def open_terminal(offspec: Program) -> Iterator[Callable[..., Terminal]]:
    """Starts the program with these options at a terminal."""
    with contextlib.ExitStack() as opened:

        def start(*options: str, **given: Any) -> Terminal:
            terminal = Terminal(offspec, *options, **given)
            opened.callback(terminal.close)
            return terminal

        yield start


# Pipes


def test_stdout_has_only_the_answers(offspec: Program) -> None:
    out, err, code = offspec.pipe("Why?\n\n/set temperature=0.5\n/stats\n/tree\n/help\nAnd?\n")
    assert (out, code) == (f"{ANSWER}\n{ANSWER}\n", 0)
    assert "From the next answer on, `temperature` is `0.5`" in err
    assert "7 tokens in 1.0 s" in err and "| tokens | 7 | 7 |" in err
    assert '" because" 0.80' in err and '" scattering." by the target' in err
    assert "`/retry [temperature]`: Answer the last question again." in err
    assert "\x1b" not in out + err
    assert offspec.questions() == ["Why?", "And?"]
    assert "error: cannot copy: stderr is not a terminal" in offspec.pipe("Why?\n/copy\n")[1]


def test_sampling_defaults_of_the_model_are_shown_and_used(offspec: Program) -> None:
    own = SamplingParams(temperature=0.6, top_k=20)
    _, err, _ = offspec.pipe("Why?\n/set top_k=5\n/set top_k=default\n/stats\n", own=own)
    note = "temperature 0.6, top_k 20 (from generation_config.json); /set changes them."
    assert err.count(f"Sampling defaults: {note}\n") == 1
    assert "`top_k` is `5`" in err and "`top_k` is `20`" in err
    assert "Sampling: temperature 0.6, top_k 20." in err
    _, err, _ = offspec.pipe("/set temperature\n", "--greedy", own=own)
    assert "`temperature` is `0`" in err and "Sampling defaults" not in err
    _, err, _ = offspec.pipe("/set\n", "--resume", own=own)  # as saved
    assert "| `temperature` | `0.6` |" in err and "Sampling defaults" not in err


def test_quiet_prints_only_requested_output(offspec: Program) -> None:
    out, err, _ = offspec.pipe("Why?\n/seed\n", "--quiet")
    assert out == f"{ANSWER}\n"
    assert err.startswith("A new seed is chosen") and err.count("\n") == 1


def test_multi_line_questions(offspec: Program) -> None:
    offspec.pipe('one \\\ntwo\n"""\n/help is\nnot a command\n\n"""\n"""\n//quit\n"""\n//quit\nlast \\\n')
    questions = ["one \ntwo", "/help is\nnot a command\n", "//quit", "/quit", "last \n"]
    assert offspec.questions() == questions
    offspec.pipe('"""\nfirst\nsecond')  # an unclosed block is still sent
    assert offspec.questions("first") == ["first\nsecond"]


def test_error_is_one_line_and_the_chat_continues(offspec: Program) -> None:
    script = Script("one two three four five", fail_after=1)
    out, err, code = offspec.pipe("Why?\n/undo 5\n/nonsense\n/set top_p=7\nAnd?\n", script=script)
    assert out == f"one two three four\n{ANSWER}\n"
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 4 and "Traceback" not in err
    assert "read failed" in errors[0] and "only one question" in errors[1]
    assert "top_p must be above 0 and at most 1" in errors[3]
    assert code == 2  # of the last failure: a script must see that something failed


@pytest.mark.parametrize(
    ("question", "where"),
    [
        (b"Wh\xff?\n", "this line"),
        (b'"""\none\ntw\xffo\nthree\n/quit\n"""\n', "line 2 of this question"),
        (b"one \\\ntw\xffo \\\nthree\n", "line 2 of this question"),
    ],
    ids=["a line", "a block", "lines that go on"],
)
def test_invalid_bytes_are_not_sent(question: bytes, where: str, offspec: Program) -> None:
    out, err, code = offspec.pipe(question + b"Why?\n")
    assert (out, code) == (f"{ANSWER}\n", 2)
    assert f"error: {where} is not UTF-8 text: byte 2" in err
    assert offspec.questions() == ["Why?"]


def test_conversations_are_continued(offspec: Program) -> None:
    """The latest, or one by its name."""
    assert "this is a new one" in offspec.pipe("Why?\n/save shopping\n", "--resume")[1]
    assert "Resuming 'shopping' (one question)." in offspec.pipe("And?\n", "--resume")[1]
    offspec.pipe("Other?\n")
    assert offspec.pipe("So?\n", "--session", "shopping")[2] == 0
    assert offspec.questions("shopping") == ["Why?", "And?", "So?"]
    _, err, _ = offspec.pipe("/clear\n/sessions\n/load other?\nMore?\n", "--session", "Shopping")
    assert "Resuming 'shopping' (3 questions)." in err
    assert "- **shopping**, 3 questions to demo" in err
    assert offspec.questions("Other?") == ["Other?", "More?"]


def test_unusable_session_is_reported_before_loading(offspec: Program) -> None:
    offspec.pipe("Why?\n")
    (entry,) = offspec.archive.list()

    def refused(*options: str) -> str:
        out, err, code = offspec.pipe("And?\n", *options)
        assert (out, code, offspec.loads) == ("", 1, 0) and err.startswith("error: ") and err.count("\n") == 1
        return err

    claim = Claim(entry.file)
    assert "is open in another terminal" in refused("--resume")
    claim.release()
    entry.file.write_text(entry.file.read_text().replace('"role": "assistant"', '"role": "nobody"'))
    for options in (["--resume"], ["--session", "why?"]):
        assert "not a valid session file" in refused(*options)


def test_edit_undo_retry_and_quit(offspec: Program) -> None:
    lines = ["Why?", "/retry", "/edit Why not?", "More?", "/edit", "/undo", "/undo", "/branch 3", "/undo 1"]
    out, err, code = offspec.pipe("\n".join([*lines, "/undo", "/quit", "Never?\n"]), "--temperature", "0.5")
    assert (out.count(ANSWER), code) == (4, 2)
    assert "`/edit TEXT` replaces this question:\n\nMore?" in err
    assert f"Version 2 of 3:\n\nWhy?\n\n{ANSWER}\nVersion 3 of 3:\n\nWhy not?\n\n{ANSWER}" in err
    assert err.count("Removed the last question.") == 2 and "the conversation is empty; ask" in err
    assert "Never?" not in err


def test_change_of_draft(offspec: Program) -> None:
    lines = "Why?\n/draft none\nAnd?\n/draft bad/draft\nMore?\n"
    out, err, code = offspec.pipe(lines, failing=["bad/draft"])
    assert (out, code) == (f"{ANSWER}\n" * 3, 1)
    assert "The draft is none.\n" in err
    failure = (
        "error: bad/draft has another vocabulary\nloading the model again with its previous settings\n"
        "The draft is none."
    )
    assert failure in err
    assert offspec.questions() == ["Why?", "And?", "More?"]


def test_chat_survives_a_failed_reload(offspec: Program) -> None:
    """Neither the other draft nor the previous model can be loaded."""
    lines = "Why?\n/draft none\nAnd?\n/save trip\n/draft auto\nMore?\n"
    out, err, _ = offspec.pipe(lines, failing_calls=[2, 3])
    assert out == f"{ANSWER}\n" * 2 and offspec.questions("trip") == ["Why?", "More?"]
    assert "No model is loaded now" in err and "error: no model is loaded; /draft auto loads it again" in err


def test_ctrl_c_in_a_pipe_keeps_the_partial_answer_and_exits(offspec: Program) -> None:
    script = {"answers": ["word " * 4000], "delay": 0.05}
    with offspec.start(script=script) as program:
        assert program.stdin and program.stdout
        program.stdin.write(b"Why?\nNever?\n")
        program.stdin.flush()
        assert program.stdout.read(4) == b"word"
        program.send_signal(signal.SIGINT)
        _, err = program.communicate(timeout=PATIENCE)
    assert program.returncode == 130
    assert b"stopped; the partial answer is kept" in err and b"Traceback" not in err
    assert offspec.questions() == ["Why?"]


def test_closed_stdout_ends_the_chat(offspec: Program) -> None:
    with offspec.start(script={"answers": ["word\n" * 4000], "delay": 0.02}) as program:
        assert program.stdin and program.stdout and program.stderr
        program.stdin.write(b"Why?\n")
        program.stdin.flush()
        program.stdout.readline()
        program.stdout.close()
        assert program.wait(PATIENCE) == 141
        assert b"Traceback" not in program.stderr.read()
    assert offspec.questions() == ["Why?"]


# A terminal


def test_conversation_at_a_terminal(offspec: Program, open_terminal: Callable[..., Terminal]) -> None:
    """With sources underlined, a copy, an edited question and versions; the printed line continues it."""
    answers = [ANSWER, "A frog\njumps in", "Splash!", ANSWER]
    terminal = open_terminal("--plain", "--temperature", "0.5", script={"answers": answers})
    for line in ("/attach notes.txt: ", "/help: ", "loading demo, draft auto", "drafted by"):
        terminal.wait_for(line)
    terminal.answer_prompt("/sources\n")
    terminal.wait_for("underlined")
    terminal.answer_prompt("Why is it\n")
    terminal.wait_for(re.escape("The sky is\x1b[4m blue\x1b[24m because of\x1b[4m scattering.\x1b[24m"))
    terminal.answer_prompt("/copy\n")
    terminal.wait_for(re.escape(f"\x1b]52;c;{base64.b64encode(ANSWER.encode()).decode()}\a"))
    terminal.answer_prompt("/sources\n")
    terminal.answer_prompt("/edit\n")
    terminal.wait_for("> /edit Why is it")
    terminal.type(" so?\n")
    terminal.wait_for("jumps in")
    for typed, shown in (("/retry", "Splash!"), ("/branch 2", r"A frog *\r\n *jumps in")):
        terminal.answer_prompt(f"{typed}\n")
        terminal.wait_for(shown)
    terminal.answer_prompt("/qu\t\n")
    assert terminal.leave() == 0
    assert offspec.questions() == ["Why is it so?"]
    printed = re.search(r"to continue: offspec chat demo --plain .*(--session [\w-]+)", terminal.seen)
    assert printed is not None
    again = open_terminal("--plain", *printed[1].split())
    for line in (r"> Why is it so\?", "jumps in", "loading demo", "Resuming"):
        again.wait_for(line)
    again.answer_prompt("And?\n")
    again.wait_for(re.escape(ANSWER))
    again.answer_prompt("\x04")
    assert again.leave() == 0
    assert offspec.questions() == ["Why is it so?", "And?"]


def _sleeps(pid: int) -> bool:
    """Return whether a process is blocked, for longer than it may wait for one of its own threads."""
    for _ in range(20):
        time.sleep(0.005)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state != "S":
            return False
    return True


def test_ctrl_c_stops_an_answer_and_twice_at_the_prompt_exits(
    offspec: Program, open_terminal: Callable[..., Terminal]
) -> None:
    """A question between the two keeps the chat open."""
    terminal = open_terminal("--plain", script={"answers": ["word " * 4000, ANSWER], "delay": 0.05})

    def strike() -> None:
        # readline misses a signal between writing its prompt and waiting for a key; no person is that fast.
        wait_until(lambda: _sleeps(terminal.program.pid))
        terminal.program.send_signal(signal.SIGINT)

    terminal.answer_prompt("Why?\n")
    terminal.wait_for("word word")
    terminal.program.send_signal(signal.SIGINT)
    terminal.wait_for("stopped; the partial answer is kept")
    for line in ("not this one", "nor this one"):
        terminal.wait_for("> ")
        terminal.type(line)
        terminal.wait_for(line)
        strike()
        terminal.wait_for("Ctrl-C again to exit")
        terminal.wait_for("> ")
        if line == "not this one":
            terminal.type("And?\n")
            terminal.wait_for(re.escape(ANSWER))
    strike()
    while terminal.wait_for("again to exit|to continue: ") != "to continue: ":  # three seconds have passed
        strike()
    assert terminal.leave() == 130
    assert "Traceback" not in terminal.seen and "> \r\n\x1b[2mto continue: " in terminal.seen
    assert offspec.questions() == ["Why?", "And?"]


def test_prompt_stays_on_the_terminal_if_stdout_is_a_file(
    offspec: Program, open_terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    with (tmp_path / "answers.txt").open("wb") as file:
        terminal = open_terminal(stdout=file)
        terminal.answer_prompt("Why?\n")
        terminal.wait_for("7 tokens")
        terminal.answer_prompt("\x04")
        assert terminal.leave() == 0
    assert (tmp_path / "answers.txt").read_text() == f"{ANSWER}\n"


@pytest.mark.parametrize("locale", [{}, {"LC_ALL": "C.UTF-8"}], ids=["no locale", "UTF-8"])
def test_every_typed_character_is_sent(
    locale: dict[str, str], offspec: Program, open_terminal: Callable[..., Terminal]
) -> None:
    offspec.environment |= locale
    texts = ["می\u200cخواهم", "क्\u200dष", "👩\u200d👩\u200d👧", "a\u00a0b\u3000c\u00add"]
    terminal = open_terminal("--plain")
    for text in texts:
        terminal.answer_prompt(f"{text}\n")
        terminal.wait_for(re.escape(ANSWER))
    terminal.answer_prompt("/quit\n")
    assert terminal.leave() == 0
    assert offspec.questions() == texts
