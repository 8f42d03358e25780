"""Delays and costs of `offspec chat` in a terminal: first frame, key echo, processor time.

    python -m bench.chat [MODEL] [--memory 1GB] [--keys 200] [--questions 2]

The real program runs in a pseudo terminal. Keys are pressed at random moments, whether or not the previous
one was shown, and timed until their letter appears in the output. The ceiling is a bare echo.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.lib.cgroup import BenchError
from bench.lib.command import MODEL, Command, shared
from bench.lib.report import Report, read_prompts
from bench.lib.terminal import Terminal

LIMITS = {"first_frame_seconds": 1.0, "help_seconds": 0.5, "key_p95_ms": 50.0, "ui_of_a_core": 0.05}
_ECHO = (
    "import os, tty; tty.setraw(0); os.write(1, b'ready')\nwhile data := os.read(0, 1024): os.write(1, data)"
)
# Textual's queries and a terminal's replies: 2 is "supported, currently off", 0 is "unknown".
_QUERIES = {b"\x1b[?2026$p": b"\x1b[?2026;2$y", b"\x1b[?2048$p": b"\x1b[?2048;0$y"}
_UPDATE_OPENS, _UPDATE_CLOSES = b"\x1b[?2026h", b"\x1b[?2026l"
_TAIL = 1 << 16  # bytes to keep before new output: the longest distance of a mark from the end of its update
# Canadian syllabics: one column wide, and in no answer, so the first one seen is the echo of the key.
_LETTERS = [chr(code) for code in range(0x1401, 0x1680)]
_GAP_S, _ON_A_LINE = 0.15, 40
_SETTLE_S, _ANSWER_S, _FIRST_ANSWER_S = 1.0, 180.0, 600.0


class Screen(Terminal):
    """A terminal that records when marks are first shown, and replies to Textual's queries.

    Output in a synchronized update is shown when the update ends.
    """

    def __init__(self, program: Sequence[str], env: dict[str, str] | None = None) -> None:
        super().__init__(program, env)
        self._seen, self._queries = b"", dict(_QUERIES)
        self.pressed, self.delays = dict[str, float](), list[float]()
        self._letters, self._chosen = _LETTERS[::-1], random.Random(1)

    def look(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Read for a time, or until a condition holds; return whether it does."""
        ends = time.perf_counter() + seconds
        while not until():
            if self.ended or (left := ends - time.perf_counter()) <= 0:
                return False
            self._seen = self._seen[-_TAIL:] + self.read(min(left, 0.05))
            at = time.perf_counter()
            for query in [query for query in self._queries if query in self._seen]:
                self.press(self._queries.pop(query).decode())
            for letter in [letter for letter in self.pressed if self.shows(letter)]:
                self.delays.append(at - self.pressed.pop(letter))
        return True

    def shows(self, mark: str) -> bool:
        closed = self._seen.rfind(_UPDATE_CLOSES)
        is_open = self._seen.rfind(_UPDATE_OPENS) > closed
        return mark.encode() in (self._seen[:closed] if is_open and closed >= 0 else self._seen)

    def wait(self, what: str, seconds: float, until: Callable[[], bool]) -> float:
        """Wait until a condition holds; return the time. Raises BenchError."""
        if not self.look(seconds, until):
            raise BenchError(f"no {what} within {seconds:.0f} s; last shown: {self._seen[-300:]!r}")
        return time.perf_counter()

    def type(self, count: int, going_on: Callable[[], bool] = lambda: True) -> None:
        """Press letters at random moments; delete them when a line is full and at the end."""
        moment = time.perf_counter()
        for typed in range(1, count + 1):
            moment += self._chosen.uniform(0.2, 1.8) * _GAP_S
            self.look(moment - time.perf_counter())
            letter = self._letters.pop()
            self.pressed[letter] = self.press(letter)
            ends = typed == count or not going_on()
            if ends or typed % _ON_A_LINE == 0:
                self.wait("echo of all keys", 60.0, lambda: not self.pressed)
                self.press("\x7f" * _ON_A_LINE)
                self.look(_SETTLE_S)
                moment = time.perf_counter()
            if ends:
                return

    def key_delays_ms(self) -> dict[str, float]:
        """Return statistics of the delay of keys, in milliseconds."""
        delays = sorted(1e3 * delay for delay in self.delays)
        p95 = delays[math.ceil(0.95 * len(delays)) - 1]
        return {"keys": len(delays), "median_ms": median(delays), "p95_ms": p95, "max_ms": delays[-1]}

    def usage(self) -> tuple[float, float]:
        """Return wall time and processor time of the main thread, which runs the interface, in seconds."""
        spent = int(Path(f"/proc/{self.pid}/task/{self.pid}/schedstat").read_text().split()[0])
        return time.perf_counter(), spent / 1e9

    def share_since(self, before: tuple[float, float]) -> float:
        """Return the share of a core that the main thread used."""
        seconds, spent = (now - then for now, then in zip(self.usage(), before, strict=True))
        return spent / seconds


class Chat(Screen):
    """`offspec chat`, from its first frame on. Answers count once they are complete in its session file."""

    def __init__(self, args: argparse.Namespace, data: Path) -> None:
        words = [args.model, "--memory", args.memory, "--max-tokens", str(args.tokens), "--seed", "1"]
        unset = {"NO_COLOR", "COLUMNS", "LINES"}
        env = {name: value for name, value in os.environ.items() if name not in unset}
        env |= {"TERM": "xterm-256color", "COLORTERM": "truecolor", "OFFSPEC_DATA": str(data)}
        super().__init__([sys.executable, "-m", "offspec", "chat", *words], env)
        self._data, name = data, Path(args.model).name
        self.first_frame = self.wait("first frame", 60.0, lambda: self.shows(name)) - self.started
        self.torch_loaded = "libtorch" in Path(f"/proc/{self.pid}/maps").read_text()

    def ask(self, question: str) -> None:
        self.press(question)
        self.look(0.3)  # a person sees the text before pressing Enter
        self.press("\r")

    def answers(self) -> list[Any]:
        """Return figures of all complete answers in order; each has a conversation of its own."""
        from offspec.chat.conversation import Conversation

        files = sorted(self._data.rglob("*.json"), key=os.path.getmtime)
        kept = [Conversation.read(file) for file in files]
        messages = [message for chat in kept for message in chat.messages if message.role == "assistant"]
        return [message.figures for message in messages if message.finish and message.figures]

    def watched(self, question: str, keys: int = 0) -> float:
        """Ask in a new conversation while pressing keys; return the interface's share of a core."""
        self.look(_SETTLE_S)
        self.ask("/clear")
        self.look(_SETTLE_S)
        count, before = len(self.answers()), self.usage()
        self.ask(question)
        self.type(keys, lambda: len(self.answers()) == count)
        self.wait("answer", _ANSWER_S, lambda: len(self.answers()) > count)
        return self.share_since(before)


def measure(args: argparse.Namespace, data: Path) -> dict[str, Any]:
    """Measure one chat: idle, answering without keys, and answering while keys are pressed."""
    questions = [prompt.prompt for prompt in read_prompts(args.questions)]
    with Chat(args, data) as chat:
        chat.ask("Say hello.")
        chat.wait("first answer", _FIRST_ANSWER_S, lambda: bool(chat.answers()))
        chat.look(_SETTLE_S)
        before = chat.usage()
        chat.look(args.idle_seconds)
        idle = chat.share_since(before)
        shares = [chat.watched(question) for question in questions]
        speeds = [figures.tokens / figures.seconds for figures in chat.answers()[1:]]
        while (left := args.keys - len(chat.delays)) > 0:
            chat.watched(questions[0], left)
        return {
            "first_frame_seconds": chat.first_frame,
            "torch_loaded_by_first_frame": chat.torch_loaded,
            "keys_generating": chat.key_delays_ms(),
            "idle_usage": {"ui_of_a_core": idle},
            "streaming": [{"ui_of_a_core": share} for share in shares],
            "ui_tokens_per_s": median(speeds),
        }


def options(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", **MODEL)
    shared(p, memory="1GB", tokens=192)
    p.add_argument("--keys", type=int, default=200, help="keys pressed during an answer, at most 600 (200)")
    p.add_argument("--questions", type=int, default=2, help="answers without keys (default 2)")
    p.add_argument("--idle-seconds", type=float, default=10.0)


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    with Screen([sys.executable, "-c", _ECHO]) as echo:
        echo.wait("echo program", 30.0, lambda: echo.shows("ready"))
        echo.type(20)
        floor = echo.key_delays_ms()
    report.ceiling("a bare echo shows a key after {median_ms:.2f} ms, p95 {p95_ms:.2f}".format(**floor))
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "offspec", "chat", "--help"], stdout=subprocess.DEVNULL, check=True)
    found: dict[str, Any] = {"help_seconds": time.perf_counter() - began}
    with tempfile.TemporaryDirectory(prefix="offspec-bench-") as folder:
        found |= measure(args, Path(folder))
    judged = found | {
        "key_p95_ms": found["keys_generating"]["p95_ms"],
        "ui_of_a_core": max(run["ui_of_a_core"] for run in found["streaming"]),
    }
    for name, limit in LIMITS.items():
        report.reached(f"{name} {judged[name]:.3f}, limit {limit:g}")
        if judged[name] >= limit:
            report.missed(f"limit not kept: {name}")
    if found["torch_loaded_by_first_frame"]:
        report.missed("torch was loaded before the first frame")
    summary = {**report.head(args, "model", "tokens", "memory"), "floor": floor}
    report.record(summary := summary | found)
    return summary


main = Command("chat", "Delays and costs of the chat in a terminal.", options, bench)

if __name__ == "__main__":
    sys.exit(main())
