"""The program as a process of its own: signals, pipes, terminals, and what it imports."""

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE
from tests.ui.cli.program import DRIVER, ENDLESS, HEAVY, TEXT, environment, run, start


def test_interrupt_while_answering_keeps_the_partial_answer() -> None:
    with start("generate", "demo", "Why?", script=ENDLESS) as program:
        assert program.stdout
        assert [program.stdout.readline() for _ in range(2)] == ["line 0\n", "line 1\n"]
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=PATIENCE)
    assert program.returncode == 130
    assert out == "" or out.endswith("\n")
    assert "[stream closed]" in err and "[engine closed]" in err
    assert re.search(r"^stopped after \d+ tokens? in \d+ pass(es)?$", err, re.MULTILINE)
    assert "Traceback" not in err and "Aborted" not in err


def test_interrupt_while_loading() -> None:
    with start("generate", "demo", "Why?", script={"load_delay": 60}) as program:
        assert program.stderr
        assert "[loading]\n" in iter(program.stderr.readline, "")
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=PATIENCE)
    assert (program.returncode, out) == (130, "")
    assert err.splitlines() == ["[load interrupted]", "stopped"]


def test_interrupt_with_json_prints_no_partial_object() -> None:
    with start("generate", "demo", "Why?", "--json", script=ENDLESS) as program:
        assert program.stderr
        assert "[answering]\n" in iter(program.stderr.readline, "")
        program.send_signal(signal.SIGINT)
        out, _ = program.communicate(timeout=PATIENCE)
    assert (program.returncode, out) == (130, "")


def test_closed_stdout_ends_it_quietly() -> None:
    with start("generate", "demo", "Why?", "--quiet", script=ENDLESS) as program:
        assert program.stdout and program.stderr
        assert program.stdout.readline() == "line 0\n"
        program.stdout.close()
        err = program.stderr.read()
        program.wait(timeout=PATIENCE)
    assert program.returncode == 141
    assert err.splitlines() == ["[loading]", "[answering]", "[stream closed]", "[engine closed]"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_stdout_on_a_full_disk() -> None:
    with open("/dev/full", "w") as full:
        program = subprocess.run(
            [sys.executable, "-m", DRIVER, "{}", "generate", "demo", "Why?", "--quiet"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            timeout=PATIENCE,
        )
    assert program.returncode == 1
    assert program.stderr.splitlines()[-1].startswith("error: standard output is a file on a full disk")
    assert "Traceback" not in program.stderr and "Exception ignored" not in program.stderr


def on_a_terminal(*args: str, **env: str) -> tuple[str, str]:
    """stdout (a pipe) and stderr (a terminal) of the scripted program."""
    ours, theirs = pty.openpty()
    with start(*args, stderr=theirs, **env) as program:
        os.close(theirs)
        assert program.stdout
        seen = b""
        try:
            while chunk := os.read(ours, 4096):
                seen += chunk
        except OSError:  # Linux: the other end is closed
            pass
        out = program.stdout.read()
    os.close(ours)
    return out, seen.decode()


def test_progress_bars_and_colours() -> None:
    """Bars animate only on a terminal; NO_COLOR and --quiet are respected."""
    coloured = re.compile(r"\x1b\[[0-9;]*\b(3[0-7]|38;|9[0-7])")
    out, err = on_a_terminal("generate", "demo", "Why?")
    assert out == TEXT + "\n" and coloured.search(err)
    assert "opening [model]" in err and "1 of 2 files" in err and "1.00 GB of 2.00 GB" in err
    plain = on_a_terminal("generate", "demo", "Why?", NO_COLOR="1")[1]
    assert "opening" in plain and not coloured.search(plain)
    assert "\x1b" not in on_a_terminal("generate", "demo", "Why?", "--quiet")[1]
    with start("generate", "demo", "Why?", FORCE_COLOR="1") as program:
        _, err = program.communicate(timeout=PATIENCE)
    assert "opening" not in err  # colour may be forced, animation may not


def test_version_and_module() -> None:
    from offspec import __version__

    shown = run("-m", "offspec", "--version")
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, f"offspec {__version__}\n", "")


# A command line, and its exit code.
WITHOUT_WORK = [
    ("--help", 0),
    ("generate --help", 0),
    ("chat --help", 0),
    ("hardware --help", 0),
    ("doctor --help", 0),
    ("generate demo x --top-p 7", 2),
    ("hardware rtx-4090 --path .", 2),
]


def test_help_and_invalid_options_import_nothing_heavy() -> None:
    """One after another in one process; the modules of `doctor` load nothing heavy either."""
    code = f"""
import sys
from offspec.ui.cli.main import main

def heavy():
    return [name for name in {HEAVY!r}.split() if name in sys.modules]

for line, _ in {WITHOUT_WORK!r}:
    sys.argv = ["offspec", *line.split()]
    try:
        main()
    except SystemExit as left:
        print("exit", line, left.code, heavy())
import offspec.engine.doctor.run_checks
print("exit examine", heavy())
"""
    shown = run("-c", code)
    assert [line for line in shown.stdout.splitlines() if line.startswith("exit ")] == [
        *(f"exit {line} {code} []" for line, code in WITHOUT_WORK),
        "exit examine []",
    ], shown.stderr


_INTERRUPTED = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
"""


def test_ctrl_c_during_imports_is_silent(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_INTERRUPTED)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH"), os.getcwd()])])
    command, given = [sys.executable, "-m", "offspec", "--version"], {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")  # 130 in a shell
