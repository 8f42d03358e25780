"""Delays and costs of `offspec chat` in a terminal: its first frame, its keys, processor time.

    python -m bench.chat [MODEL] [--memory 1GB] [--keys 200]
    python -m bench.chat --scripted [--burn python]

The real program runs in a pseudo terminal. Keys are pressed at random moments while the model loads, while
it answers, and while nothing happens, and are timed until their letter is in what the program writes. The
floors are a program that does nothing but echo, and an empty app of the same toolkit.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.chat import floor as chat_floor
from bench.chat.drive import (
    BURNS,
    WARM_UP,
    WARM_UP_SECONDS,
    Chat,
    Program,
    answer_in_line_mode,
    kept_answers,
    tokens_per_second,
)
from bench.chat.keys import Key, Typist, Usage, told
from bench.chat.view import LIMITS, broken, show, show_floor
from bench.lib.command import MODEL, Command, shared
from bench.lib.report import Report, model_name, read_prompts

_LOADING_GAP, _GAP = 0.06, 0.15  # seconds between keys: a load is over soon
_SETTLE_SECONDS = 1.0


def programs(args: argparse.Namespace, folder: Path) -> tuple[Program, Program | None]:
    """The chat in a terminal, and the same in line mode, which a scripted engine is not asked in."""
    python = sys.executable
    if args.scripted:
        words = ("--burn", args.burn, "--pass-seconds", str(args.pass_seconds), "--words", str(args.tokens))
        return Program((python, "-m", "bench.chat.scripted", *words), "scripted", folder), None
    words = (args.model, "--memory", args.memory, "--max-tokens", str(args.tokens), "--seed", "1", *args.more)
    chat = (python, "-m", "offspec", "chat", *words)
    name = Path(args.model).name
    return Program(chat, name, folder), Program((*chat, "--plain"), name, folder)


def press_keys(program: Program, questions: Sequence[str], count: int, idle_seconds: float) -> dict[str, Any]:
    """One chat from its start: keys while it loads, answers and waits; then what it takes when idle."""
    chat = Chat(program)
    try:
        terminal = chat.terminal
        chat.ask(questions[0])  # it waits for the model, and tells when that is there
        loading = Typist(terminal, seed=1, gap=_LOADING_GAP)
        while_loading = loading.type(100 * count, lambda: not chat.asked())
        loading.take_back()
        generating: list[Key] = []
        typist, turn = Typist(terminal, seed=2, gap=_GAP), 0
        while len(generating) < count:
            turn += 1
            generating += typist.type(
                count - len(generating),
                lambda turn=turn: len(chat.answers()) < turn,  # type: ignore[misc]
            )
            typist.take_back()
            chat.wait_for_answers(turn)
            terminal.read_until(time.perf_counter() + _SETTLE_SECONDS)
            if len(generating) < count:
                chat.ask(questions[turn % len(questions)])
        idle = Typist(terminal, seed=3, gap=_GAP).type(count // 2)
        before = Usage.of(terminal.pid)
        terminal.read_until(time.perf_counter() + idle_seconds)
        cost = Usage.of(terminal.pid).since(before)
        return {
            "first_frame_seconds": chat.first_frame,
            "torch_by_then": chat.torch_by_then,
            "loading": told(while_loading),
            "generating": told(generating),
            "idle": told(idle),
            "idle_usage": cost,
        }
    finally:
        chat.close()


def watch(program: Program, questions: Sequence[str]) -> dict[str, Any]:
    """One chat without keys: how fast it answers, and what that takes of the processor."""
    chat = Chat(program)
    try:
        terminal = chat.terminal
        usage = []
        chat.ask(WARM_UP)
        terminal.wait_until(chat.warmed_up, WARM_UP_SECONDS, f"an answer to {WARM_UP!r}")
        for turn, question in enumerate(questions):
            terminal.read_until(time.perf_counter() + _SETTLE_SECONDS)
            chat.ask("/clear")
            terminal.read_until(time.perf_counter() + _SETTLE_SECONDS)
            before, read = Usage.of(terminal.pid), terminal.bytes_read
            chat.ask(question)
            chat.wait_for_answers(turn + 1)
            after = Usage.of(terminal.pid)
            usage.append({**after.since(before), "bytes_to_the_terminal": terminal.bytes_read - read})
    finally:
        chat.close()
    answers = kept_answers(program.data)
    return {
        "first_frame_seconds": chat.first_frame,
        "tokens_per_s": tokens_per_second(answers),
        "answers": len(answers),
        "usage": usage,
        "ui_of_a_core": max(row["ui_of_a_core"] for row in usage),
    }


def watch_line_mode(program: Program, questions: Sequence[str]) -> float:
    """Tokens per second of the same answers without a terminal UI."""
    answer_in_line_mode(program, questions)
    return tokens_per_second(kept_answers(program.data))


def measure(args: argparse.Namespace, folder: Path, report: Report) -> dict[str, Any]:
    """All that is not a floor."""
    ui, plain = programs(args, folder)
    questions = [prompt.prompt for prompt in read_prompts(args.questions)]
    found: dict[str, Any] = {}
    if plain is not None:
        help_words = [sys.executable, "-m", "offspec", "chat", "--help"]
        found["help_seconds"] = round(chat_floor.seconds_of(help_words), 3)
    report.progress("keys while loading, answering and waiting")
    found["keys"] = press_keys(ui.elsewhere("keys"), questions, args.keys, args.idle_seconds)
    found["watched"], found["line_mode_tokens_per_s"] = [], []
    for turn in range(args.rounds):
        for face in ("ui", "plain") if turn % 2 == 0 else ("plain", "ui"):
            report.progress(f"round {turn + 1} of {args.rounds}: {face}, without keys")
            if face == "ui":
                found["watched"].append(watch(ui.elsewhere(f"ui-{turn}"), questions))
            elif plain is not None:
                found["line_mode_tokens_per_s"].append(
                    watch_line_mode(plain.elsewhere(f"plain-{turn}"), questions)
                )
    return found


def summarise(found: dict[str, Any]) -> dict[str, Any]:
    """The figures that are judged and shown."""
    keys, watched = found["keys"], found["watched"]
    speeds = [run["tokens_per_s"] for run in watched]
    summary = {
        "first_frame_seconds": round(median([run["first_frame_seconds"] for run in (keys, *watched)]), 3),
        "torch_loaded_by_first_frame": keys["torch_by_then"],
        **{f"keys_{when}": keys[when] for when in ("loading", "generating", "idle")},
        "idle_usage": keys["idle_usage"],
        "ui_of_a_core_streaming": max(run["ui_of_a_core"] for run in watched),
        "streaming": [row for run in watched for row in run["usage"]],
        "ui_tokens_per_s": round(median(speeds), 2),
    }
    if found["line_mode_tokens_per_s"]:
        plain = median(found["line_mode_tokens_per_s"])
        summary["help_seconds"] = found["help_seconds"]
        summary["line_mode_tokens_per_s"] = round(plain, 2)
        summary["ui_of_line_mode"] = round(median(speeds) / plain, 3)
    return summary


def options(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", **MODEL)
    shared(p, memory="1GB", tokens=192)
    p.add_argument("--keys", type=int, default=200, help="keys pressed while it answers (default 200)")
    p.add_argument("--questions", type=int, default=2, help="answers of a round without keys")
    p.add_argument("--rounds", type=int, default=2, help="of answers in the terminal and in line mode")
    p.add_argument("--idle-seconds", type=float, default=10.0)
    p.add_argument(
        "--first-run", action="store_true", help="with an empty cache, so that it measures the machine too"
    )
    p.add_argument("--more", nargs="*", default=[], metavar="OPTION", help="more options of offspec chat")
    p.add_argument("--scripted", action="store_true", help="an engine that follows a script, without torch")
    p.add_argument("--burn", choices=BURNS, default="none", help="what runs beside a scripted engine")
    p.add_argument("--pass-seconds", type=float, default=0.2, help="of a scripted pass of 4 tokens")


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Measure the floors and the chat, and tell; short of its aim where a limit is broken."""
    report.progress("the floors")
    floor = chat_floor.measure(args.keys // 2, args.idle_seconds / 2)
    show_floor(floor, report)
    with tempfile.TemporaryDirectory(prefix="offspec-bench-") as folder:
        if args.first_run:
            os.environ["OFFSPEC_CACHE"] = str(Path(folder) / "cache")
        found = measure(args, Path(folder), report)
    settings = ("scripted", "burn", "pass_seconds") if args.scripted else ("memory", "first_run", "more")
    summary = {
        **report.head(args, "tokens", *settings),
        "model": "scripted" if args.scripted else model_name(args.model),
        "floor": floor,
        **summarise(found),
        "limits": LIMITS,
    }
    summary["broken"] = broken(summary)
    show(summary, report)
    report.record(summary, variant="-scripted" if args.scripted else "", rounds=found["watched"])
    report.exit_code = int(bool(summary["broken"]))
    return summary


main = Command("chat", "Delays and costs of the chat in a terminal.", options, bench)

if __name__ == "__main__":
    sys.exit(main())
