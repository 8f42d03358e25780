"""What Ctrl-C leaves behind, at random moments of the program's commands on a terminal.

    python -m bench.interrupts [--single 500] [--double 200] [--commands generate chat] [--cold]

Each run gets one Ctrl-C at a random moment, or two. It is judged by what a user sees: it ends, by SIGINT or
with exit code 130; the terminal takes lines again and shows its cursor; at most one line is unusual; no
unfinished file is left. Runs are forked from a process that has imported everything, so that strikes meet the
work; with `--cold` each is a program of its own, and most strikes meet the imports.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.lib.process import say
from bench.lib.terminal import Terminal

PATIENCE = 20.0  # seconds until a run that was struck must have ended
_AGAIN = 1.0  # seconds from one key that leaves to the next, where a strike only ended an answer
_BETWEEN = 1.5  # seconds, at most, from the first strike to the second
# Notices: the runs before this one have measured more, or some files were whole when it was struck.
_NOTICES = ("the plan is remade", "# of # files are finished and kept")
_MODES = re.compile(rb"\x1b\[\?(\d+)([hl])")
_ON = {b"25", b"7"}  # modes of a terminal that nothing has changed
_SEQUENCE = re.compile(r"\x1b\[([\d;?<>=]*)([@-~])|\x1b\][^\a\x1b]*(?:\a|\x1b\\)|\x1b[^\[\]]|.|\n")
_ENGINE = ("--memory", "2GB", "--context", "256", "--dtype", "float32")
_DISTIL = ("--tokens", "1200", "--length", "16", "--epochs", "2", "--depth", "2", "--dtype", "float32")


@dataclass(frozen=True, slots=True)
class Command:
    """A command line to strike."""

    words: tuple[str, ...]  # {model} and {out} stand for folders
    typed: str = ""  # keys that are there from the beginning
    talks: bool = False  # it answers on the terminal, and Ctrl-C during an answer ends the answer alone
    codes: tuple[str, ...] = ("SIGINT", "130")  # that are right


COMMANDS = {
    "generate": Command(("generate", "{model}", "w4 w5 w6", *_ENGINE, "--max-tokens", "40")),
    "plan": Command(("plan", "{model}", *_ENGINE, "--replan")),
    "pack": Command(("pack", "{model}", "--to", "int8", "--out", "{out}")),
    "distill": Command(("distill", "{model}", "--kind", "medusa", "--out", "{out}", *_DISTIL)),
    "chat-plain": Command(("chat", "{model}", *_ENGINE, "--plain"), "w4 w5 w6\nw7 w8\n", talks=True),
    "chat": Command(("chat", "{model}", *_ENGINE), "w4 w5 w6\r", talks=True, codes=("SIGINT", "130", "0")),
}


@dataclass(slots=True)
class Run:
    """How a run went. status: As of `os.waitpid`; None if it did not end and was killed."""

    output: bytes = b""
    status: int | None = None
    seconds: float = 0.0
    sane: bool = True
    left: list[str] = field(default_factory=list)

    @property
    def ending(self) -> str:
        """The exit code, or the name of the signal."""
        if self.status is None:
            return "a hang"
        if os.WIFSIGNALED(self.status):
            return signal.Signals(os.WTERMSIG(self.status)).name
        return str(os.WEXITSTATUS(self.status))


class Stage:
    """A scratch folder with a tiny model, in which commands are run and struck."""

    def __init__(self, place: Path, *, cold: bool) -> None:
        self._place, self._cold, self._temporary = place, cold, place / "temporary"
        for name in ("cache", "data", "config"):
            os.environ[f"OFFSPEC_{name.upper()}"] = str(place / name)
        os.environ |= {"TMPDIR": str(self._temporary), "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
        tempfile.tempdir = None
        import offspec.distill.make
        import offspec.engine.load
        import offspec.engine.validation
        import offspec.model.quantize.pack
        import offspec.ui.cli.main
        import offspec.ui.cli.plain
        import offspec.ui.tui.app  # noqa: F401
        from tests.support.tiny_models import write_model

        # pack has groups of 64
        write_model(place / "model", spread=0.2, hidden_size=64, intermediate_size=64, head_dim=16)

    def run(self, command: Command, strikes: Sequence[float]) -> Run:
        """Run a command and strike it so many seconds after its beginning."""
        for folder in (self._temporary, self._place / "out", self._place / "data"):
            shutil.rmtree(folder, ignore_errors=True)
        self._temporary.mkdir()
        with Terminal(lambda: self._become(command)) as terminal:
            before = termios.tcgetattr(terminal.end)[:4]
            terminal.press(command.typed)
            run = _watch(terminal, strikes, command.talks)
            run.sane = termios.tcgetattr(terminal.end)[:4] == before
        run.left = sorted(self._leftovers())
        return run

    def _become(self, command: Command) -> None:
        """In the forked process: run the program. Leaves by SystemExit."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the program begins
        if not command.talks:
            answer = os.open(self._place / "answer", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(answer, 1)
            os.close(answer)
        names = {"model": str(self._place / "model"), "out": str(self._place / "out")}
        words = [word.format(**names) for word in command.words]
        if self._cold:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.execv(sys.executable, [sys.executable, "-m", "offspec", *words])
        from offspec.__main__ import main as program

        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        sys.argv = ["offspec", *words]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        program()
        raise SystemExit

    def _leftovers(self) -> Iterator[str]:
        """Files that only a run under way has."""
        for file in self._place.rglob("*"):
            if ".partial" in file.name or file.parent == self._temporary:
                yield str(file.relative_to(self._place))


def _watch(terminal: Terminal, strikes: Sequence[float], talks: bool) -> Run:
    """Read the terminal, strike, and wait for the end."""
    run, due = Run(), list(strikes)
    last = strikes[-1] if strikes else 4.0  # seconds that a chat is given which nothing strikes
    leave_at = last + _AGAIN
    while not terminal.has_exited():
        now = time.perf_counter() - terminal.started
        if due and now >= due[0]:
            terminal.press("\x03")
            due.pop(0)
        elif talks and not due and now >= leave_at:
            terminal.press("\x03")
            leave_at = now + _AGAIN
        elif not due and now > last + (PATIENCE if strikes else 10 * PATIENCE):
            break
        run.output += terminal.read(min(0.05, max(0.0, due[0] - now)) if due else 0.05)
        if terminal.ended:
            time.sleep(0.01)
    run.status, run.seconds = terminal.status, time.perf_counter() - terminal.started
    while rest := terminal.read(0):
        run.output += rest
    return run


def screen_lines(output: bytes) -> list[str]:
    """The lines that a terminal shows of what was written on it, those that scrolled away included."""
    lines, row, column = [""], 0, 0
    for mark in _SEQUENCE.finditer(output.decode(errors="replace")):
        text, numbers, kind = mark[0], mark[1], mark[2]
        if text == "\r":
            column = 0
        elif text == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif kind == "A":
            row = max(0, row - int(numbers or 1))
        elif kind == "K":
            lines[row] = "" if numbers == "2" else lines[row][:column]
        elif len(text) == 1 and text.isprintable():
            lines[row] = lines[row].ljust(column)[:column] + text + lines[row][column + 1 :]
            column += 1
    return [line.strip() for line in lines if line.strip()]


def lines_beside(output: bytes) -> list[str]:
    """Lines in a form in which two runs can be compared: without numbers, and the screen of the chat."""
    said = output.rpartition(b"\x1b[?1049l")[2]
    alike = (re.sub(r"\d[\d.,]*", "#", line.replace("^C", "")).strip() for line in screen_lines(said))
    return [line for line in alike if line]


def faults(command: Command, run: Run, usual: set[str]) -> list[str]:
    """Sentences on a run that was struck. usual: Lines of a run that was not."""
    found = []
    if run.ending not in (*command.codes, "0"):
        found.append(f"ended with {run.ending}")
    if not run.sane:
        found.append("the terminal's settings are changed")
    modes = dict(_MODES.findall(run.output))
    if wrong := [mode.decode() for mode, now in modes.items() if (now == b"h") != (mode in _ON)]:
        found.append(f"modes left: {', '.join(sorted(wrong))}")
    if run.left:
        found.append(f"files left: {', '.join(run.left)}")
    more = [line for line in lines_beside(run.output) if line not in usual and not line.startswith(_NOTICES)]
    if any(re.search(r"Traceback|Exception|Error|pop from|terminate", line) for line in more) or (
        len(more) > 1 and not command.talks
    ):
        found.append("said: " + " | ".join(more[-8:]))
    return found


def sweep(stage: Stage, names: Sequence[str], plan: dict[str, int], seed: int) -> dict[str, dict[str, int]]:
    """Strike commands in turns, and print faults to stderr; counts by command.

    plan: How many runs get a single strike, and how many a double one.
    """
    chance = random.Random(seed)
    usual, lasts = dict[str, set[str]](), dict[str, float]()
    for name in names:
        stage.run(COMMANDS[name], ())  # what it compiles is there then; what it learns may take more runs
        runs = [stage.run(COMMANDS[name], ()) for _ in range(3)]
        usual[name] = {line for run in runs for line in lines_beside(run.output)}
        lasts[name] = runs[-1].seconds
        say(f"{name}: {runs[-1].seconds:.1f} s, ended with {runs[-1].ending}")
    counts = {name: {**dict.fromkeys(plan, 0), "faults": 0} for name in names}
    kinds = [kind for kind, count in plan.items() for _ in range(count)]
    chance.shuffle(kinds)
    for index, kind in enumerate(kinds):
        name = names[index % len(names)]
        first = chance.uniform(0.03, lasts[name])
        strikes = [first] if kind == "single" else [first, first + _BETWEEN * chance.random() ** 3]
        run = stage.run(COMMANDS[name], strikes)
        counts[name][kind] += 1
        if wrong := faults(COMMANDS[name], run, usual[name]):
            counts[name]["faults"] += 1
            say(f"{index} {name}, {', '.join(f'{at:.3f} s' for at in strikes)}: {'; '.join(wrong)}")
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 1 if a strike left something behind."""
    parser = argparse.ArgumentParser(prog="python -m bench.interrupts", description=__doc__)
    parser.add_argument("--single", type=int, default=500)
    parser.add_argument("--double", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commands", nargs="*", choices=list(COMMANDS), default=list(COMMANDS))
    parser.add_argument("--cold", action="store_true", help="a program of its own for each strike")
    args = parser.parse_args(argv)
    place, own = Path(tempfile.mkdtemp(prefix="offspec-interrupts-")), os.getpid()
    try:
        plan = {"single": args.single, "double": args.double}
        counts = sweep(Stage(place, cold=args.cold), args.commands, plan, args.seed)
    finally:
        if os.getpid() == own:  # a forked run leaves through here as well
            shutil.rmtree(place)
    print(json.dumps(counts))
    return int(any(count["faults"] for count in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
