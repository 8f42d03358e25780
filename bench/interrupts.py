"""What Ctrl-C leaves behind, at random moments of the program's commands on a terminal.

Each run is the program on a pseudo-terminal, which gets one Ctrl-C at a random moment, or two. It is judged
by what a user sees: it ends, by SIGINT or with exit code 130; the terminal takes lines again and shows its
cursor; beside the answer there is one line more than usual; no unfinished file is left.

A run is forked from this process, which has imported everything before, so that strikes meet the work; with
`--cold` it is a program of its own, and most strikes meet the imports.
"""

import argparse
import fcntl
import json
import os
import pty
import random
import re
import select
import shutil
import signal
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATIENCE = 20.0  # seconds until a run that was struck must have ended
_AGAIN = 1.0  # seconds from one key that leaves to the next, where a strike only ended an answer
_BETWEEN = 1.5  # seconds, at most, from the first strike to the second
_LEARNT = "the plan is remade"  # told by any run: the runs before it have measured more
_LATE = 5.0
_MODES = re.compile(rb"\x1b\[\?(\d+)([hl])")
_ON = {b"25", b"7"}  # modes of a terminal that nothing has changed
_SEQUENCE = re.compile(r"\x1b\[([\d;?<>=]*)([@-~])|\x1b\][^\a\x1b]*(?:\a|\x1b\\)|\x1b[^\[\]]|.|\n")
_SIZE = struct.pack("HHHH", 30, 100, 0, 0)
_KEY = b"\x03"


@dataclass(frozen=True, slots=True)
class Command:
    """A command line to strike. Its words may name {model} and {out}.

    Args:
        name: what it is called in the report.
        words: of the command line.
        typed: keys that are there from the beginning.
        talks: it is a chat: it answers on the terminal, and Ctrl-C during an answer ends the answer alone.
        codes: exit codes that are right.
    """

    name: str
    words: tuple[str, ...]
    typed: str = ""
    talks: bool = False
    codes: tuple[str, ...] = ("SIGINT", "130")


_ENGINE = ("--memory", "2GB", "--context", "256", "--dtype", "float32")
_DISTIL = ("--tokens", "1200", "--length", "16", "--epochs", "2", "--depth", "2", "--dtype", "float32")
COMMANDS = (
    Command("generate", ("generate", "{model}", "w4 w5 w6", *_ENGINE, "--max-tokens", "40")),
    Command("plan", ("plan", "{model}", *_ENGINE, "--replan")),
    Command("pack", ("pack", "{model}", "--to", "int8", "--out", "{out}")),
    Command("distill", ("distill", "{model}", "--kind", "medusa", "--out", "{out}", *_DISTIL)),
    Command("chat-plain", ("chat", "{model}", *_ENGINE, "--plain"), "w4 w5 w6\nw7 w8\n", talks=True),
    Command("chat", ("chat", "{model}", *_ENGINE), "w4 w5 w6\r", talks=True, codes=("SIGINT", "130", "0")),
)


@dataclass(slots=True)
class Run:
    """How a run went. status: as `waitpid` gives it; None where it did not end and was killed."""

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
        """cold: each run is a program of its own."""
        self._place, self._cold = place, cold
        self._temporary = place / "temporary"

    def prepare(self) -> None:
        """Write the model, and import what runs need."""
        for name in ("cache", "data", "config"):
            os.environ[f"OFFSPEC_{name.upper()}"] = str(self._place / name)
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

        shape: dict[str, Any] = {
            "hidden_size": 64,
            "intermediate_size": 64,
            "head_dim": 16,
        }  # pack has groups of 64
        write_model(self._place / "model", spread=0.2, **shape)

    def run(self, command: Command, strikes: Sequence[float]) -> Run:
        """Run a command and strike it so many seconds after its beginning."""
        for folder in (self._temporary, self._place / "out", self._place / "data"):
            shutil.rmtree(folder, ignore_errors=True)
        self._temporary.mkdir()
        pid, terminal = pty.fork()
        if pid == 0:
            self._become(command)
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, _SIZE)
        before = termios.tcgetattr(terminal)[:4]
        os.write(terminal, command.typed.encode())
        run = _watch(pid, terminal, strikes, command.talks)
        run.sane = termios.tcgetattr(terminal)[:4] == before
        os.close(terminal)
        run.left = sorted(self._leftovers())
        return run

    def _become(self, command: Command) -> None:
        """In the forked process: run the program. Leaves by SystemExit."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not command.talks:
            answer = os.open(self._place / "answer", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(answer, 1)
            os.close(answer)
        names = {"model": str(self._place / "model"), "out": str(self._place / "out")}
        words = [word.format(**names) for word in command.words]
        if self._cold:
            os.execv(sys.executable, [sys.executable, "-m", "offspec", *words])
        from offspec.__main__ import main as program

        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        sys.argv = ["offspec", *words]
        program()

    def _leftovers(self) -> Iterator[str]:
        """Files that only a run under way has."""
        for file in self._place.rglob("*"):
            if ".partial" in file.name or file.parent == self._temporary:
                yield str(file.relative_to(self._place))


def _watch(pid: int, terminal: int, strikes: Sequence[float], talks: bool) -> Run:
    """Read the terminal, strike, and wait for the end."""
    run, output, began = Run(), bytearray(), time.monotonic()
    due = list(strikes)
    last = strikes[-1] if strikes else 4.0  # seconds that a chat is given which nothing strikes
    leave_at = last + _AGAIN
    while True:
        now = time.monotonic() - began
        if due and now >= due[0]:
            os.write(terminal, _KEY)
            due.pop(0)
        if talks and not due and now >= leave_at:
            os.write(terminal, _KEY)
            leave_at = now + _AGAIN
        if not due and now > last + (PATIENCE if strikes else 10 * PATIENCE):
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            break
        if output_now := _read(terminal, min(0.05, max(0.0, due[0] - now)) if due else 0.05):
            output += output_now
            continue
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            run.status = status
            break
    run.seconds = time.monotonic() - began
    while rest := _read(terminal, 0):
        output += rest
    run.output = bytes(output)
    return run


def _read(terminal: int, seconds: float) -> bytes:
    """What comes from the other end within a time; nothing where it is closed."""
    if not select.select([terminal], [], [], seconds)[0]:
        return b""
    try:
        return os.read(terminal, 65536)
    except OSError:
        time.sleep(0.01)
        return b""


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
    """What is wrong with a run that was struck. usual: lines of a run that was not."""
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
    more = [line for line in lines_beside(run.output) if line not in usual and not line.startswith(_LEARNT)]
    if any(re.search(r"Traceback|Exception|Error|pop from|terminate", line) for line in more) or (
        len(more) > 1 and not command.talks
    ):
        found.append("said: " + " | ".join(more[-8:]))
    return found


def sweep(
    stage: Stage, commands: Sequence[Command], plan: Sequence[int], seed: int, seconds: float
) -> dict[str, dict[str, int]]:
    """Strike commands in turns, and tell of what is wrong on stderr; counts by command.

    Args:
        stage: where they run.
        commands: to strike.
        plan: how many runs get one strike, and how many two.
        seed: of the moments.
        seconds: after which it ends with what there is.
    """
    until, chance = time.monotonic() + seconds, random.Random(seed)
    usual, lasts = dict[str, set[str]](), dict[str, float]()
    counts = {command.name: {"single": 0, "double": 0, "faults": 0} for command in commands}
    for command in commands:
        stage.run(command, ())  # what it compiles is there then; what it learns may take more runs
        runs = [stage.run(command, ()) for _ in range(3)]
        usual[command.name] = {line for run in runs for line in lines_beside(run.output)}
        run = runs[-1]
        lasts[command.name] = run.seconds
        _say(f"{command.name}: {run.seconds:.1f} s, ended with {run.ending}")
    kinds = ["single"] * plan[0] + ["double"] * plan[1]
    chance.shuffle(kinds)
    for index, kind in enumerate(kinds):
        command = commands[index % len(commands)]
        first = chance.uniform(0.03, lasts[command.name])
        strikes = [first] if kind == "single" else [first, first + _BETWEEN * chance.random() ** 3]
        if time.monotonic() > until:
            break
        run = stage.run(command, strikes)
        counts[command.name][kind] += 1
        if run.seconds - strikes[-1] > _LATE and not command.talks:
            _say(f"{index} {command.name}: it ended {run.seconds - strikes[-1]:.1f} s after {strikes}")
        if wrong := faults(command, run, usual[command.name]):
            counts[command.name]["faults"] += 1
            _say(f"{index} {command.name}, {', '.join(f'{at:.3f} s' for at in strikes)}: {'; '.join(wrong)}")
    return counts


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 1 where a strike left something behind."""
    parser = argparse.ArgumentParser(prog="python -m bench.interrupts", description=__doc__)
    parser.add_argument("--single", type=int, default=500)
    parser.add_argument("--double", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="end after so long, with what there is")
    parser.add_argument("--commands", nargs="*", choices=[command.name for command in COMMANDS])
    parser.add_argument("--cold", action="store_true", help="a program of its own for each strike")
    given = parser.parse_args(argv)
    chosen = [command for command in COMMANDS if not given.commands or command.name in given.commands]
    place, own = Path(tempfile.mkdtemp(prefix="offspec-interrupts-")), os.getpid()
    try:
        stage = Stage(place, cold=given.cold)
        stage.prepare()
        counts = sweep(stage, chosen, (given.single, given.double), given.seed, given.seconds)
    finally:
        if os.getpid() == own:  # a forked run leaves through here as well
            shutil.rmtree(place)
    print(json.dumps(counts))
    return int(any(count["faults"] for count in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
