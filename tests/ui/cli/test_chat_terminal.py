"""The whole chat, from keys to screen and file: the real program and model in a tmux terminal."""

import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from offspec.chat.conversation import Conversation, Message
from offspec.checkpoint.open import DEMO_PACKAGE, open_checkpoint
from tests.support.tmux import HAS_TMUX, Tmux

pytestmark = [
    pytest.mark.skipif(not HAS_TMUX, reason="tmux is not installed"),
    pytest.mark.skipif(
        importlib.util.find_spec(DEMO_PACKAGE) is None, reason=f"{DEMO_PACKAGE} is not installed"
    ),
]
READY = "Enter sends"
STORY = "Write a long story about a lighthouse."
TALE = "Write a long tale about a harbour."


def start(data: Path, *options: str) -> Tmux:
    # Unpacked, the model does not fit in so little memory, and streams.
    model = data.parent / "demo"
    if not model.exists():
        model.symlink_to(open_checkpoint("demo", unpack=True).folder)
    words = ["chat", str(model), "--memory", "1.2GB", "--context", "1024", "--budget", "16", "--width", "4"]
    words += ["--dtype", "float32", "--device", "cpu"]
    variables = {"OFFSPEC_DATA": str(data), "OFFSPEC_CACHE": os.environ["OFFSPEC_CACHE"]}
    return Tmux([sys.executable, "-m", "offspec", *words, *options], variables)


def messages(data: Path) -> list[Message]:
    """Messages of the only saved conversation; none if there is none yet."""
    files = list(data.rglob("*.json"))
    assert len(files) <= 1
    return list(Conversation.read(files[0]).messages) if files else []


def last(data: Path) -> Message | None:
    return messages(data)[-1] if messages(data) else None


def is_under_way(data: Path) -> Callable[[], bool]:
    """Return whether an unfinished answer has been saved."""

    def check() -> bool:
        message = last(data)
        return message is not None and bool(message.content) and message.role == "assistant"

    return check


def is_kept(data: Path, seen: str) -> bool:
    """Return whether the last message is an answer with at least these letters."""
    message = last(data)
    return message is not None and message.role == "assistant" and words_of(message.content).startswith(seen)


def answered(data: Path, count: int) -> Callable[[], bool]:
    """Return a check that there are `count` complete answers."""

    def check() -> bool:
        answers = [message for message in messages(data) if message.role == "assistant"]
        return len(answers) == count and all(answer.finish for answer in answers)

    return check


def words_of(text: str) -> str:
    """Keep only letters, so that line breaks and Markdown do not count."""
    return "".join(filter(str.isalnum, text))


# Two programs that load a real model: half a minute.
@pytest.mark.exhaustive
def test_conversation_survives_its_process(tmp_path: Path) -> None:
    """One answer is stopped and one ends; the chat is resumed, and killed in the middle of an answer."""
    data = tmp_path / "data"
    with start(data, "--draft", "suffix") as terminal:
        terminal.wait_for("demo")
        terminal.type(STORY)  # while the model loads
        terminal.wait_for(STORY)
        terminal.press("Enter")
        terminal.wait_until(is_under_way(data), "an answer")
        terminal.press("Escape")
        terminal.wait_until(answered(data, 1), "an end of the answer")
        stopped = last(data)
        assert stopped is not None and stopped.finish == "halted"
        terminal.wait_for("stopped")
        terminal.wait_for(READY)
        terminal.send("/set max_tokens=6")
        terminal.send("What is the capital of France?")
        terminal.wait_until(answered(data, 2), "a second answer")
        terminal.wait_for(READY)
        terminal.send("/quit")
        terminal.wait_until(lambda: terminal.exit_code() is not None, "an end of the program")
        assert terminal.exit_code() == 0
    said = messages(data)
    assert [message.role for message in said] == ["user", "assistant"] * 2
    assert said[3].figures is not None and said[3].figures.tokens <= 6

    with start(data, "--resume", "--draft", "none") as terminal:
        said_before = words_of(said[3].content)
        terminal.wait_until(lambda: said_before in words_of(terminal.screen()), "what was said before")
        assert "capital of France" in terminal.wait_for(READY)
        terminal.send("And of Italy?")
        terminal.wait_until(answered(data, 3), "a third answer")
        assert messages(data)[:4] == said
        said = messages(data)

        terminal.wait_for(READY)
        terminal.send("/set max_tokens=500")
        terminal.send(TALE)
        terminal.wait_until(lambda: len(shown_of_answer(terminal.screen())) > 30, "an answer")
        seen = shown_of_answer(terminal.screen())
        terminal.wait_until(lambda: is_kept(data, seen), "what was seen in the file")
        os.kill(terminal.pid(), signal.SIGKILL)
        terminal.wait_until(lambda: terminal.exit_code() is not None, "an end of the program")
    assert messages(data)[:6] == said
    question, answer = messages(data)[6:]
    assert (question.role, answer.role) == ("user", "assistant")
    assert question.content == TALE and answer.finish is None
    assert words_of(answer.content).startswith(seen)


def shown_of_answer(screen: str) -> str:
    """Letters between the last question and the status line."""
    lines = screen.rstrip().splitlines()
    question_lines = [number for number, line in enumerate(lines) if TALE in line and "·" not in line]
    return words_of("".join(lines[question_lines[-1] + 1 : -2])) if question_lines else ""
