"""The whole chat, from keys to screen and file: the real program and model in a terminal of tmux."""

import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

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
    # In float32 a second answer is the first, to the last token, whatever trees they came from. Unpacked, the
    # model does not fit in so little memory, and streams.
    model = data.parent / "demo"
    if not model.exists():
        model.symlink_to(open_checkpoint("demo", unpack=True).folder)
    words = ["chat", str(model), "--memory", "1.2GB", "--context", "1024", "--budget", "16", "--width", "4"]
    words += ["--dtype", "float32", "--device", "cpu"]
    variables = {"OFFSPEC_DATA": str(data), "OFFSPEC_CACHE": os.environ["OFFSPEC_CACHE"]}
    return Tmux([sys.executable, "-m", "offspec", *words, *options], variables)


def conversation(data: Path) -> Conversation | None:
    """The only one that is kept, None where there is none yet."""
    files = list(data.rglob("*.json"))
    assert len(files) <= 1
    return Conversation.read(files[0]) if files else None


def last(data: Path) -> Message | None:
    talk = conversation(data)
    return talk.messages[-1] if talk and talk.messages else None


def is_under_way(data: Path) -> Callable[[], bool]:
    """Whether something of an answer has been kept that goes on."""

    def check() -> bool:
        message = last(data)
        return message is not None and bool(message.content) and message.role == "assistant"

    return check


def is_kept(data: Path, seen: str) -> bool:
    """Whether the last message is an answer that has at least these letters."""
    message = last(data)
    return message is not None and message.role == "assistant" and words_of(message.content).startswith(seen)


def answered(data: Path, count: int) -> Callable[[], bool]:
    """Whether there are so many answers, and all have ended."""

    def check() -> bool:
        talk = conversation(data)
        answers = [] if talk is None else [m for m in talk.messages if m.role == "assistant"]
        return len(answers) == count and all(answer.finish for answer in answers)

    return check


def words_of(text: str) -> str:
    """Only letters, so that lines and marks of Markdown do not count."""
    return "".join(filter(str.isalnum, text))


@pytest.fixture
def near() -> Iterator[Path]:
    """A folder with a short name: one that fits on a line of the terminal is easier to find there."""
    with TemporaryDirectory() as folder:
        yield Path(folder)


# Two programs that load a real model: half a minute.
@pytest.mark.exhaustive
def test_a_conversation_outlives_its_process(tmp_path: Path, near: Path) -> None:
    """It is stopped, asked again, saved, resumed, and killed in the middle of an answer."""
    data, copy = tmp_path / "data", near / "copy.json"
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
        terminal.send("/retry")
        terminal.wait_until(lambda: last(data) not in (stopped, None), "another answer")
        terminal.wait_until(answered(data, 1), "an end of the answer")
        again = last(data)
        assert again is not None and again.finish == "length" and again.figures is not None
        shorter, longer = sorted((again.content, stopped.content), key=len)
        assert again.figures.tokens == 6 and longer.startswith(shorter)

        terminal.wait_for(READY)
        terminal.send("What is the capital of France?")
        terminal.wait_until(answered(data, 2), "a second answer")
        second = last(data)
        assert second is not None and second.figures is not None and again.figures is not None
        # A pass of the second answer streams what one of the first did: nothing was read for the prefix.
        first_pass = again.figures.bytes_streamed / again.figures.passes
        assert 0 < second.figures.bytes_streamed <= 1.01 * first_pass * second.figures.passes

        terminal.send(f"/save {copy}")
        terminal.wait_until(copy.exists, "a copy")
        terminal.send("/quit")
        terminal.wait_until(lambda: terminal.exit_code() is not None, "an end of the program")
        assert terminal.exit_code() == 0
    said = Conversation.read(copy).messages
    assert [message.role for message in said] == ["user", "assistant"] * 2

    with start(data, "--resume", "--draft", "none") as terminal:
        said_before = words_of(second.content)
        terminal.wait_until(lambda: said_before in words_of(terminal.screen()), "what was said before")
        assert "capital of France" in terminal.wait_for(READY)
        terminal.send("And of Italy?")
        terminal.wait_until(answered(data, 3), "a third answer")
        talk = conversation(data)
        assert talk is not None and talk.messages[:4] == said and talk.params.max_tokens == 6
        said = talk.messages

        terminal.wait_for(READY)
        terminal.send("/set max_tokens=500")
        terminal.send(TALE)
        terminal.wait_until(lambda: len(shown_of_answer(terminal.screen())) > 30, "an answer")
        seen = shown_of_answer(terminal.screen())
        terminal.wait_until(lambda: is_kept(data, seen), "what was seen in the file")
        os.kill(terminal.pid(), signal.SIGKILL)
        terminal.wait_until(lambda: terminal.exit_code() is not None, "an end of the program")
    talk = conversation(data)
    assert talk is not None and talk.messages[:6] == said
    question, answer = talk.messages[6:]
    assert (question.role, answer.role) == ("user", "assistant")
    assert question.content == TALE and answer.finish is None
    assert words_of(answer.content).startswith(seen)


def shown_of_answer(screen: str) -> str:
    """The letters between the last question and the line that tells what the machine does."""
    lines = screen.rstrip().splitlines()
    asked = [number for number, line in enumerate(lines) if TALE in line and "·" not in line]
    return words_of("".join(lines[asked[-1] + 1 : -2])) if asked else ""
