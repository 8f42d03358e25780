"""A terminal whose screen a test can read: tmux, with a server of its own that ends with the test."""

import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

HAS_TMUX = shutil.which("tmux") is not None
COLUMNS, ROWS = 90, 36  # under 100 columns there is no side panel, so that lines are those of the chat


class Tmux:
    """One program in one window, which stays open after the program ends."""

    def __init__(self, argv: Sequence[str], variables: Mapping[str, str]) -> None:
        # A socket path is limited to 107 bytes, which a test's own folder can exceed.
        self._folder = Path(tempfile.mkdtemp(prefix="offspec-tmux-"))
        settings = [f"{name}={value}" for name, value in variables.items()]
        program = shlex.join(["env", "-u", "NO_COLOR", *settings, *argv])
        inner = shlex.quote(f"echo $$ > pid; exec {program}")
        shell = f"cd {self._folder} && (sh -c {inner}; echo $? > code); exec sleep 1000"
        size = ["-x", str(COLUMNS), "-y", str(ROWS)]
        self._run("-u", "-f", "/dev/null", "new-session", "-d", *size, shell)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._run("kill-server")
        shutil.rmtree(self._folder, ignore_errors=True)

    def type(self, text: str) -> None:
        """Type characters literally."""
        self._run("send-keys", "-l", "--", text)

    def type_bytes(self, data: bytes) -> None:
        """Send bytes, which need not be valid text."""
        self._run("send-keys", "-H", *(f"{byte:02x}" for byte in data))

    def press(self, key: str) -> None:
        """Press a key, by its name in tmux: Enter, Escape, C-b."""
        self._run("send-keys", key)

    def send(self, line: str) -> None:
        """Type a line, and press Enter once it is visible."""
        self.type(line)
        self.wait_for(line[-20:])
        self.press("Enter")

    def screen(self) -> str:
        """Return the visible text."""
        return self._run("capture-pane", "-p")

    def title(self) -> str:
        """Title of the terminal, as set by the program."""
        return self._run("display-message", "-p", "#{pane_title}").rstrip("\n")

    def pid(self) -> int:
        """Process id of the program."""
        return int((self._folder / "pid").read_text())

    def exit_code(self) -> int | None:
        """Exit code of the program as a shell reports it; None while it runs."""
        file = self._folder / "code"
        return int(file.read_text() or 0) if file.exists() else None

    def wait_for(self, text: str, seconds: float = 240) -> str:
        """Wait for this text, and return the first screen with it."""
        screen = ""

        def is_there() -> bool:
            nonlocal screen
            screen = self.screen()
            return text in screen

        self.wait_until(is_there, f"{text!r} on the screen", seconds)
        return screen  # not a later screen, which may be half drawn

    def wait_until(self, reached: Callable[[], bool], what: str, seconds: float = 240) -> None:
        """Wait until the condition holds, with ten checks a second."""
        until = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < until, f"no {what} after {seconds} s:\n{self.screen()}"
            time.sleep(0.1)

    def _run(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", f"{self._folder}/socket", *words], check=True, capture_output=True, text=True
        )
        return done.stdout
