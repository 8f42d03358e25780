"""Input of the line mode: lines from a terminal or a pipe, joined into questions."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offspec.core.errors import RequestError
from offspec.ui.chat.commands import is_command, unescaped
from offspec_planners.units import format_bytes

MOST_INPUT = 2**26  # maximum bytes of a prompt, or of one of its lines
_BLOCK = '"""'


@dataclass(frozen=True, slots=True)
class UserInputLine:
    """A question as sent to the model, or a command."""

    text: str
    is_command: bool = False


class LineInput:
    """Reader of questions and commands from standard input.

    edits: whether lines can be edited, recalled and completed: on a terminal, if Python has readline.
    """

    def __init__(self, complete: Callable[[str], list[str]]) -> None:
        """complete: function that returns the possible completions of a whole line."""
        self.is_terminal = sys.stdin is not None and sys.stdin.isatty()
        self._complete = complete
        self._offered: list[str] = []
        self.edits = self.is_terminal and sys.stdout.isatty() and self._prepare_editing()

    def read(self, initial_text: str = "") -> UserInputLine | None:
        """Read the next question or command; None at the end of the input.

        A line that ends in a backslash continues on the next; lines between lines of three quotes are one
        question. Raises RequestError if the question is not UTF-8, after reading all of it, and
        KeyboardInterrupt.

        initial_text: text for the user to edit and send.
        """
        line = self._line("> ", initial_text)
        if line is not None and line.strip() == _BLOCK:
            return self._block()
        lines = []
        while line is not None and line.endswith("\\"):
            lines.append(line[:-1])
            line = self._line(". ")
        if line is None and not lines:
            return None
        text = _joined([*lines, line or ""])
        return UserInputLine(text, is_command=True) if is_command(text) else UserInputLine(unescaped(text))

    def _block(self) -> UserInputLine:
        lines = []
        while (line := self._line(". ")) is not None and line.strip() != _BLOCK:
            lines.append(line)
        return UserInputLine(_joined(lines))

    def _line(self, prompt: str, begun: str = "") -> str | None:
        """Read one line, in which surrogates stand for bytes that are not UTF-8."""
        if self.edits:
            return self._edited_line(prompt, begun)
        if self.is_terminal:
            sys.stderr.write(prompt)
            sys.stderr.flush()
        data = sys.stdin.buffer.readline(MOST_INPUT + 1) if sys.stdin is not None else b""
        if len(data) > MOST_INPUT:
            while data and not data.endswith(b"\n"):
                data = sys.stdin.buffer.readline(MOST_INPUT)
            raise RequestError(
                f"a line has more than {format_bytes(MOST_INPUT)}, more than any context holds; send less"
            )
        return data.decode("utf-8", "surrogateescape").rstrip("\r\n") if data else None

    def _edited_line(self, prompt: str, begun: str) -> str | None:
        import readline

        readline.set_startup_hook((lambda: readline.insert_text(begun)) if begun else None)
        try:
            return input(prompt)
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:  # later output, such as how to continue, starts on its own line
            print()
            raise
        except UnicodeDecodeError as error:
            return error.object.decode("utf-8", "surrogateescape").rstrip("\r\n")
        finally:
            readline.set_startup_hook(None)

    def _prepare_editing(self) -> bool:
        try:
            import readline
        except ImportError:
            return False
        readline.set_completer_delims("")  # completions replace the whole line
        readline.set_completer(self._offer)
        libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
        return True

    def _offer(self, line: str, index: int) -> str | None:
        """Return completion `index` of the line; readline calls this with 0, 1, … until None."""
        if index == 0:
            self._offered = self._complete(line)
        return self._offered[index] if index < len(self._offered) else None


def _joined(lines: Sequence[str]) -> str:
    """Join lines to a text. Raises RequestError if they are not UTF-8."""
    for number, line in enumerate(lines, 1):
        try:
            line.encode("utf-8", "surrogateescape").decode("utf-8")
        except UnicodeDecodeError as error:
            which = "this line" if len(lines) == 1 else f"line {number} of this question"
            raise RequestError(f"{which} is not UTF-8 text: byte {error.start} is invalid") from None
    return "\n".join(lines)
