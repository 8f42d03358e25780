"""Lines from a person or a pipe, put together to questions."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offspec.core.errors import RequestError
from offspec.ui.chat.commands import is_command, unescaped
from offspec_planners.units import format_bytes

MOST_INPUT = 2**26  # bytes of a prompt, or of a line of it
_BLOCK = '"""'


@dataclass(frozen=True, slots=True)
class Typed:
    """A question, as it is to be said, or a command."""

    text: str
    is_command: bool = False


class PlainInput:
    """Reads questions and commands from standard input.

    edits: whether lines can be edited, recalled and completed, as at a terminal where Python has readline.
    """

    def __init__(self, complete: Callable[[str], list[str]]) -> None:
        """complete: the whole lines that a line may become."""
        self.is_terminal = sys.stdin is not None and sys.stdin.isatty()
        self._complete = complete
        self._offered: list[str] = []
        self.edits = self.is_terminal and sys.stdout.isatty() and self._prepare_editing()

    def read(self, begun: str = "") -> Typed | None:
        """The next question or command, None at the end. begun: what the user is to change and send.

        A line that ends in a backslash goes on in the next; what stands between lines of three quotes is one
        question. Raises RequestError for bytes that are no text, once all of the question was read, and
        KeyboardInterrupt.
        """
        line = self._line("> ", begun)
        if line is not None and line.strip() == _BLOCK:
            return self._block()
        lines = []
        while line is not None and line.endswith("\\"):
            lines.append(line[:-1])
            line = self._line(". ")
        if line is None and not lines:
            return None
        text = _joined([*lines, line or ""])
        return Typed(text, is_command=True) if is_command(text) else Typed(unescaped(text))

    def _block(self) -> Typed:
        lines = []
        while (line := self._line(". ")) is not None and line.strip() != _BLOCK:
            lines.append(line)
        return Typed(_joined(lines))

    def _line(self, prompt: str, begun: str = "") -> str | None:
        """One line, in which surrogates stand for bytes that are no text."""
        if self.edits:
            return self._edited_line(prompt, begun)
        if self.is_terminal:
            sys.stderr.write(prompt)
            sys.stderr.flush()
        data = sys.stdin.buffer.readline(MOST_INPUT + 1) if sys.stdin is not None else b""
        if len(data) > MOST_INPUT:
            while data and not data.endswith(b"\n"):
                data = sys.stdin.buffer.readline(MOST_INPUT)
            raise RequestError(f"a line has more than {format_bytes(MOST_INPUT)}, which no context holds")
        return data.decode("utf-8", "surrogateescape").rstrip("\r\n") if data else None

    def _edited_line(self, prompt: str, begun: str) -> str | None:
        import readline

        readline.set_startup_hook((lambda: readline.insert_text(begun)) if begun else None)
        try:
            return input(prompt)
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:  # what comes next, such as how to continue, has a line of its own
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
        readline.set_completer_delims("")  # what is completed is the whole line
        readline.set_completer(self._offer)
        libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
        return True

    def _offer(self, line: str, index: int) -> str | None:
        """readline asks with 0, 1, … until there is nothing more."""
        if index == 0:
            self._offered = self._complete(line)
        return self._offered[index] if index < len(self._offered) else None


def _joined(lines: Sequence[str]) -> str:
    """The text of these lines. Raises RequestError where bytes of them are no text."""
    for number, line in enumerate(lines, 1):
        try:
            line.encode("utf-8", "surrogateescape").decode("utf-8")
        except UnicodeDecodeError as error:
            which = "this line" if len(lines) == 1 else f"line {number} of this question"
            raise RequestError(f"{which} is not UTF-8 text: byte {error.start} is not part of it") from None
    return "\n".join(lines)
