"""`offspec chat` as a bench drives it: questions by keys, answers from the conversations that it keeps."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.chat.keys import has_loaded
from bench.chat.terminal import Terminal, environment
from bench.lib.cgroup import BenchError
from bench.lib.process import ROOT
from offspec.chat.conversation import AnswerFigures, Conversation

BURNS = ("none", "python", "native")  # what may run beside a scripted engine; see chat_scripted.py
WARM_UP = "Say hello."  # the first question of a chat whose speed is measured; it waits for the model
_START_SECONDS = 60.0
_ANSWER_SECONDS = 180.0
_READ_SECONDS = 0.3
WARM_UP_SECONDS = 600.0  # a first run measures the machine


@dataclass(frozen=True, slots=True)
class Program:
    """A chat that can be started: its words, what its first frame shows, and where it keeps conversations."""

    argv: tuple[str, ...]
    name: str
    data: Path

    def elsewhere(self, name: str) -> Program:
        """The same program with its conversations in a folder of that name, beside those it had."""
        return replace(self, data=self.data / name)

    @property
    def environment(self) -> dict[str, str]:
        return environment(OFFSPEC_DATA=str(self.data))


class Chat:
    """A chat in a terminal, from its first frame on.

    first_frame: seconds from its start until the name of the model was shown. torch_by_then: whether torch
    had been loaded. An answer counts when it is complete in the file that the chat keeps.
    """

    def __init__(self, program: Program) -> None:
        self._data = program.data
        self.terminal = Terminal(program.argv, program.environment)
        try:
            shown = self.terminal.wait_for(program.name, _START_SECONDS)
            self.torch_by_then = has_loaded(self.terminal.pid, "libtorch")
        except BaseException:
            self.close()
            raise
        self.first_frame = shown - self.terminal.started

    def close(self) -> None:
        """End the program, whatever it does: what it kept is on disk."""
        self.terminal.__exit__(None, None, None)

    def ask(self, question: str) -> None:
        """Send a question as a person does, who sees it before pressing Enter; it may wait for the model."""
        self.terminal.press(question)
        self.terminal.read_until(time.perf_counter() + _READ_SECONDS)
        self.terminal.press("\r")

    def answers(self) -> list[AnswerFigures]:
        return kept_answers(self._data)

    def asked(self) -> bool:
        """Whether a question has reached the model, which is when it is first kept."""
        return bool(kept(self._data))

    def warmed_up(self) -> bool:
        """Whether `WARM_UP` was answered."""
        return any(chat.title == WARM_UP and chat.messages[-1].finish for chat in kept(self._data))

    def wait_for_answers(self, count: int) -> None:
        """Wait until so many answers are complete. Raises BenchError."""
        self.terminal.wait_until(lambda: len(self.answers()) >= count, _ANSWER_SECONDS, "an answer")


def kept(data: Path) -> list[Conversation]:
    """The conversations in a folder, in no order."""
    return [Conversation.read(file) for file in data.rglob("*.json")]


def kept_answers(data: Path) -> list[AnswerFigures]:
    """The figures of all answers that came to an end, but for those to `WARM_UP`."""
    return [
        message.figures
        for conversation in kept(data)
        if conversation.title != WARM_UP
        for message in conversation.messages
        if message.role == "assistant" and message.finish is not None and message.figures is not None
    ]


def answer_in_line_mode(program: Program, questions: Sequence[str]) -> None:
    """Ask `WARM_UP` and then the questions through a pipe, each in a conversation of its own.

    Raises BenchError.
    """
    done = subprocess.run(
        program.argv,
        input="\n/clear\n".join([WARM_UP, *questions]) + "\n",
        env=program.environment,
        cwd=ROOT,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        timeout=_START_SECONDS + len(questions) * _ANSWER_SECONDS,
    )
    if done.returncode:
        raise BenchError(f"the line mode failed with exit code {done.returncode}: {done.stderr.strip()}")


def tokens_per_second(answers: Sequence[AnswerFigures]) -> float:
    """Tokens of all answers over the seconds of all, as the engine counts them."""
    seconds = sum(answer.seconds for answer in answers)
    return sum(answer.tokens for answer in answers) / seconds if seconds else 0.0
