"""The line mode, as a program: through pipes and at a terminal, over a scripted engine."""

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

from offspec.chat.archive import Archive
from offspec.core.file_lock import Claim
from tests.support.products import some
from tests.support.waiting import PATIENCE, until
from tests.ui.cli.program import DRIVER, ROOT, Child

ANSWER = "The sky is blue because of scattering."
BLOCK = b'"""\none\ntw\xffo\nthree\n/quit\n"""\n'


class Program:
    """`offspec chat demo`, with its data in a folder of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.archive = Archive(folder / "sessions")
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
        script = {"answers": [ANSWER], **(script or {})}
        command = [sys.executable, "-m", DRIVER, json.dumps(script), "chat", "demo", *options]
        return Child(
            command,
            cwd=ROOT,
            env=self.environment,
            **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **kwargs},
        )

    def pipe(
        self, text: str | bytes, *options: str, script: dict[str, Any] | None = None
    ) -> tuple[str, str, int]:
        """What it wrote to stdout and stderr, and its exit code."""
        data = text.encode() if isinstance(text, str) else text
        with self.start(*options, script=script) as program:
            out, err = program.communicate(data, timeout=PATIENCE)
        return out.decode(), err.decode(), program.returncode

    def questions(self, name: str = "") -> list[str]:
        """All that was asked in a conversation, by default the only one."""
        (entry,) = [entry for entry in self.archive.list() if name in ("", entry.title)]
        messages = json.loads(entry.file.read_text())["messages"]
        return [message["content"] for message in messages if message["role"] == "user"]


@pytest.fixture
def offspec(tmp_path: Path) -> Program:
    return Program(tmp_path)


class Terminal:
    """The program at a terminal; what it writes there is gathered in `seen`."""

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

    def wait_for(self, pattern: str) -> None:
        """Read until the pattern appears after what earlier waits have found."""
        while not (match := re.search(pattern, self.seen[self._found :])):
            self._read()
        self._found += match.end()

    def leave(self) -> int:
        """Read to the end; the exit code."""
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
    """Starts the program with such options at a terminal."""
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
    assert "From the next answer on `temperature` is `0.5`" in err
    assert "7 tokens in 1.0 s" in err and "| tokens | 7 | 7 |" in err
    assert '" because" 0.80' in err and '" scattering." by the target' in err
    assert "`/retry [temperature]`: Answer the last question again." in err
    assert "\x1b" not in out + err
    assert offspec.questions() == ["Why?", "And?"]


def test_quiet_leaves_what_was_asked_for(offspec: Program) -> None:
    out, err, _ = offspec.pipe("Why?\n/seed\n", "--quiet")
    assert out == f"{ANSWER}\n"
    assert err.startswith("A new seed is chosen") and err.count("\n") == 1


def test_questions_of_many_lines(offspec: Program) -> None:
    offspec.pipe('one \\\ntwo\n"""\n/help is\nnot a command\n\n"""\n"""\n//quit\n"""\n//quit\nlast \\\n')
    questions = ["one \ntwo", "/help is\nnot a command\n", "//quit", "/quit", "last \n"]
    assert offspec.questions() == questions


def test_a_block_without_its_end_is_asked_all_the_same(offspec: Program) -> None:
    offspec.pipe('"""\nfirst\nsecond')
    assert offspec.questions() == ["first\nsecond"]


def test_an_error_is_one_line_and_the_chat_goes_on(offspec: Program) -> None:
    script = {"answers": ["one two three four five", ANSWER], "fail_after": 1}
    out, err, code = offspec.pipe("Why?\n/undo 5\n/nonsense\n/set top_p=7\nAnd?\n", script=script)
    assert out == f"one two three four\n{ANSWER}\n"
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 4 and "Traceback" not in err
    assert "read failed" in errors[0] and "only one question" in errors[1]
    assert "top_p must be above 0 and at most 1" in errors[3]
    assert code == 2  # of the last failure: a script must see that something failed


def test_bytes_that_are_no_text(offspec: Program) -> None:
    out, err, code = offspec.pipe(b"Wh\xff?\nWhy?\n")
    assert (out, code) == (f"{ANSWER}\n", 2)
    assert "error: this line is not UTF-8 text: byte 2" in err


@pytest.mark.parametrize(
    "question",
    some([BLOCK, b"one \\\ntw\xffo \\\nthree\n"], BLOCK),
)
def test_no_rest_of_a_question_with_such_bytes_is_asked(question: bytes, offspec: Program) -> None:
    out, err, code = offspec.pipe(question + b"Why?\n")
    assert (out, code) == (f"{ANSWER}\n", 2)
    assert "error: line 2 of this question is not UTF-8 text: byte 2" in err
    assert offspec.questions() == ["Why?"]


def test_resume_goes_on_with_the_latest(offspec: Program) -> None:
    assert "this is a new one" in offspec.pipe("Why?\n", "--resume")[1]
    assert "Going on with 'Why?': one question so far." in offspec.pipe("And?\n", "--resume")[1]
    assert offspec.questions() == ["Why?", "And?"]


@pytest.mark.exhaustive
def test_conversations_have_names(offspec: Program) -> None:
    offspec.pipe("Why?\n/save shopping\n")
    offspec.pipe("Other?\n")
    assert offspec.pipe("And?\n", "--session", "shopping")[2] == 0
    assert offspec.questions("shopping") == ["Why?", "And?"]
    _, err, _ = offspec.pipe("/clear\n/sessions\n/load other?\nMore?\n", "--session", "Shopping")
    assert "Going on with 'shopping': 2 questions so far." in err
    assert "- **shopping**, 2 questions to demo" in err
    assert offspec.questions("Other?") == ["Other?", "More?"]


def test_a_session_that_is_not_there_is_told_before_the_model_is_loaded(offspec: Program) -> None:
    out, err, code = offspec.pipe("Why?\n", "--session", "nowhere")
    assert (out, code) == ("", 1)
    assert err.startswith("error: there is no session 'nowhere'") and err.count("\n") == 1


@pytest.mark.parametrize(
    "options", [("--session", "why?"), pytest.param(("--resume",), marks=pytest.mark.exhaustive)]
)
def test_a_damaged_session_is_told_before_the_model_is_loaded(
    options: tuple[str, ...], offspec: Program
) -> None:
    offspec.pipe("Why?\n")
    (entry,) = offspec.archive.list()
    entry.file.write_text(entry.file.read_text().replace('"role": "assistant"', '"role": "nobody"'))
    out, err, code = offspec.pipe("And?\n", *options)
    assert (out, code) == ("", 1)
    assert err.startswith("error: ") and "not a session that can be used" in err and err.count("\n") == 1


def test_a_session_that_is_open_elsewhere_is_told_before_the_model_is_loaded(offspec: Program) -> None:
    offspec.pipe("Why?\n")
    (entry,) = offspec.archive.list()
    claim = Claim(entry.file)
    out, err, code = offspec.pipe("And?\n", "--resume")
    claim.release()
    assert (out, code) == ("", 1)
    assert "is open in another terminal" in err and err.count("\n") == 1


def test_no_name_is_no_session(offspec: Program) -> None:
    assert offspec.pipe("", "--session", "")[1:] == (
        "error: --session needs a name; --resume continues the latest conversation\n",
        2,
    )


def test_resume_and_session_exclude_each_other(offspec: Program) -> None:
    assert offspec.pipe("", "--resume", "--session", "x")[1:] == (
        "error: --session NAME continues that conversation already; leave out --resume\n",
        2,
    )


def test_edit_undo_retry_and_quit(offspec: Program) -> None:
    lines = ["Why?", "/retry", "/edit Why not?", "More?", "/edit", "/undo", "/undo", "/branch 3", "/undo 1"]
    out, err, code = offspec.pipe("\n".join([*lines, "/undo", "/quit", "Never?\n"]), "--temperature", "0.5")
    assert (out.count(ANSWER), code) == (4, 2)
    assert "`/edit TEXT` asks this question differently:\n\nMore?" in err
    assert f"Version 2 of 3:\n\nWhy?\n\n{ANSWER}\nVersion 3 of 3:\n\nWhy not?\n\n{ANSWER}" in err
    assert err.count("Took back the last question.") == 2 and "nothing has been asked yet" in err
    assert "Never?" not in err


def test_another_draft(offspec: Program) -> None:
    script = {"failing_drafts": ["bad/draft"]}
    out, err, code = offspec.pipe("Why?\n/draft none\nAnd?\n/draft bad/draft\nMore?\n", script=script)
    assert out == f"{ANSWER}\n" * 3
    assert "The draft is none.\n" in err
    assert (
        "error: bad/draft has another vocabulary\nloading the model as it was before\nThe draft is none."
        in err
    )
    assert offspec.questions() == ["Why?", "And?", "More?"]
    assert code == 1


def test_the_chat_outlives_a_model_that_cannot_be_loaded_again(offspec: Program) -> None:
    """Neither the other draft, nor the model as it was."""
    lines = "Why?\n/draft none\nAnd?\n/save trip\n/draft auto\nMore?\n"
    out, err, _ = offspec.pipe(lines, script={"away": [2, 3]})
    assert out == f"{ANSWER}\n" * 2 and offspec.questions("trip") == ["Why?", "More?"]
    assert "No model is loaded now" in err and "error: no model is loaded; /draft auto loads it again" in err


def test_copy_needs_a_terminal(offspec: Program) -> None:
    assert "error: there is no terminal here" in offspec.pipe("Why?\n/copy\n")[1]


def test_ctrl_c_in_a_pipe_keeps_what_came_and_leaves(offspec: Program) -> None:
    script = {"answers": ["word " * 4000], "delay": 0.05}
    with offspec.start(script=script) as program:
        assert program.stdin and program.stdout
        program.stdin.write(b"Why?\nNever?\n")
        program.stdin.flush()
        assert program.stdout.read(4) == b"word"
        program.send_signal(signal.SIGINT)
        _, err = program.communicate(timeout=PATIENCE)
    assert program.returncode == 130
    assert b"stopped, and kept as far as it came" in err and b"Traceback" not in err
    assert offspec.questions() == ["Why?"]


def test_a_reader_that_leaves_ends_it(offspec: Program) -> None:
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


def test_a_conversation_at_a_terminal(offspec: Program, open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal("--plain")
    terminal.wait_for("drafted by")
    terminal.answer_prompt("Why?\n")
    terminal.wait_for(re.escape(ANSWER))
    terminal.answer_prompt("/copy\n")
    terminal.wait_for(re.escape(f"\x1b]52;c;{base64.b64encode(ANSWER.encode()).decode()}\a"))
    terminal.answer_prompt("\x04")
    assert terminal.leave() == 0
    assert offspec.questions() == ["Why?"]


def test_what_is_left_at_a_terminal_is_continued_by_the_line_that_is_printed(
    offspec: Program, open_terminal: Callable[..., Terminal]
) -> None:
    terminal = open_terminal("--plain")
    for line in ("/attach notes.txt: ", "/help: ", "loading demo, draft auto"):
        terminal.wait_for(line)
    terminal.answer_prompt("Why?\n")
    terminal.wait_for(re.escape(ANSWER))
    terminal.answer_prompt("\x04")
    assert terminal.leave() == 0
    words = re.search(r"to continue: offspec chat demo --plain (--session [\w-]+)", terminal.seen)
    assert words is not None
    again = open_terminal("--plain", *words[1].split())
    for line in (r"> Why\?", re.escape(ANSWER), "loading demo", "Going on"):
        again.wait_for(line)
    again.answer_prompt("And?\n")
    again.wait_for(re.escape(ANSWER))
    again.answer_prompt("\x04")
    assert again.leave() == 0
    assert offspec.questions() == ["Why?", "And?"]


def _sleeps(pid: int) -> bool:
    """Whether a process waits, for longer than it may wait for another of its threads."""
    for _ in range(20):
        time.sleep(0.005)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state != "S":
            return False
    return True


def test_ctrl_c_stops_and_two_at_the_prompt_leave(
    offspec: Program, open_terminal: Callable[..., Terminal]
) -> None:
    terminal = open_terminal("--plain", script={"answers": ["word " * 4000, ANSWER], "delay": 0.05})
    terminal.answer_prompt("Why?\n")
    terminal.wait_for("word word")
    terminal.program.send_signal(signal.SIGINT)
    terminal.wait_for("stopped, and kept")
    terminal.answer_prompt("And?\n")
    terminal.wait_for(re.escape(ANSWER))
    terminal.wait_for("> ")
    # readline overlooks a signal between writing its prompt and waiting for a key, as no person would hit it.
    terminal.type("not this one")
    terminal.wait_for("not this one")
    until(lambda: _sleeps(terminal.program.pid))
    terminal.program.send_signal(signal.SIGINT)
    terminal.wait_for("Ctrl-C again to leave")
    terminal.wait_for("> ")
    until(lambda: _sleeps(terminal.program.pid))
    terminal.program.send_signal(signal.SIGINT)
    assert terminal.leave() == 130
    assert "Traceback" not in terminal.seen and "> \r\n\x1b[2mto continue: " in terminal.seen
    assert offspec.questions() == ["Why?", "And?"]


def test_a_question_between_two_ctrl_c_keeps_the_chat_open(
    offspec: Program, open_terminal: Callable[..., Terminal]
) -> None:
    terminal = open_terminal("--plain")
    for line in ("not this one", "nor this one"):
        terminal.wait_for("> ")
        terminal.type(line)
        terminal.wait_for(line)
        until(lambda: _sleeps(terminal.program.pid))
        terminal.program.send_signal(signal.SIGINT)
        terminal.wait_for("Ctrl-C again to leave")
        terminal.answer_prompt("Why?\n")
        terminal.wait_for(re.escape(ANSWER))
    terminal.answer_prompt("\x04")
    assert terminal.leave() == 0
    assert offspec.questions() == ["Why?", "Why?"]


def test_a_page_keeps_the_line_breaks_of_an_answer(open_terminal: Callable[..., Terminal]) -> None:
    script = {"answers": ["A frog\njumps in", "Splash!"]}
    terminal = open_terminal("--plain", "--temperature", "0.5", script=script)
    both = r"A frog *\r\n *jumps in"
    for typed, shown in (("Why?", "jumps in"), ("/retry", "Splash!"), ("/branch 1", both)):
        terminal.answer_prompt(f"{typed}\n")
        terminal.wait_for(shown)


def test_sources_are_underlined(offspec: Program, open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal("--plain")
    terminal.answer_prompt("/sources\n")
    terminal.wait_for("underlined")
    terminal.answer_prompt("Why?\n")
    terminal.wait_for(re.escape("The sky is\x1b[4m blue\x1b[24m because of\x1b[4m scattering.\x1b[24m"))
    terminal.type("/quit\n")
    assert terminal.leave() == 0


def test_answers_to_a_file_leave_the_prompt_on_the_terminal(
    offspec: Program, open_terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    with (tmp_path / "answers.txt").open("wb") as file:
        terminal = open_terminal(stdout=file)
        terminal.answer_prompt("Why?\n")
        terminal.wait_for("7 tokens")
        terminal.answer_prompt("\x04")
        assert terminal.leave() == 0
    assert (tmp_path / "answers.txt").read_text() == f"{ANSWER}\n"


def test_an_edited_question_is_there_to_be_changed(
    offspec: Program, open_terminal: Callable[..., Terminal]
) -> None:
    terminal = open_terminal("--plain")
    terminal.answer_prompt("Why is it\n")
    terminal.answer_prompt("/edit\n")
    terminal.wait_for("> /edit Why is it")
    terminal.type(" so?\n")
    terminal.wait_for(re.escape(ANSWER))
    terminal.type("/qu\t\n")
    assert terminal.leave() == 0
    assert offspec.questions() == ["Why is it so?"]


@pytest.mark.parametrize("script", [{}, {"LC_ALL": "C.UTF-8"}], ids=["no locale", "UTF-8"])
def test_every_character_that_is_typed_is_asked(
    script: dict[str, str], offspec: Program, open_terminal: Callable[..., Terminal]
) -> None:
    offspec.environment |= script
    texts = ["می\u200cخواهم", "क्\u200dष", "👩\u200d👩\u200d👧", "a\u00a0b\u3000c\u00add"]
    terminal = open_terminal("--plain")
    for text in texts:
        terminal.answer_prompt(f"{text}\n")
        terminal.wait_for(re.escape(ANSWER))
    terminal.answer_prompt("/quit\n")
    assert terminal.leave() == 0
    assert offspec.questions() == texts
