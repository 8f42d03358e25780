"""The two streams of the line mode: answers on stdout, everything else on stderr."""

import base64
import sys

from rich.console import Console
from rich.text import Text

from offspec.core.errors import RequestError
from offspec.core.events import FinishReason, LoadProgress, Result, TextDelta
from offspec.ui.cli.live import Live, open_live
from offspec.ui.cli.output import Output
from offspec.ui.printable import printable

_UNDERLINED = "\x1b[4m{}\x1b[24m"
_ENDINGS: dict[FinishReason, str] = {
    "eos": "",
    "stop": "",
    "length": "; cut at max_tokens, which /set changes",
    "context": "; the context is full: /undo takes questions back, /clear begins anew",
    "halted": "; stopped, and kept as far as it came",
}


class PlainScreen:
    """quiet: errors, and what a command was asked for, are all there is on stderr.

    sources: whether tokens that the target added are underlined, on a terminal.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._out = Output()
        self._err = Console(stderr=True, highlight=False)
        self._quiet = quiet
        self._live: Live = open_live(self._err, wanted=not quiet and sys.stderr.isatty())
        self._text_is_open = False
        self.sources = False

    def loading(self, event: LoadProgress) -> None:
        self._live.progress(event)

    def moving(self, line: str) -> None:
        """What the machine is doing; nothing where that would write over an answer."""
        if line and not self._text_is_open:
            self._live.status(line)

    def still(self) -> None:
        """Nothing is under way any more."""
        self._live.stop()

    def text(self, delta: TextDelta) -> None:
        """A part of an answer. Raises StdoutClosed, and DiskFullError where stdout is a file."""
        if not delta.text:
            return
        if self._out.is_terminal:
            self._live.stop()
            self._text_is_open = True
        if self._out.is_terminal and self.sources:
            for piece in delta.pieces:
                shown = printable(piece.text)
                self._out.write_styled(_UNDERLINED.format(shown) if piece.source == "bonus" else shown)
        else:
            self._out.write(delta.text)

    def end_answer(self, result: Result | None) -> None:
        """The answer is over. result: None where it failed. Raises as `text` does."""
        self._live.stop()
        self._text_is_open = False
        self._out.end_line()
        if result is not None:
            self.note(
                f"{result.tokens:,} tokens in {result.seconds:.1f} s, {result.tok_per_s:.2f} tok/s, "
                f"{result.tokens_per_pass:.1f} a pass{_ENDINGS[result.finish_reason]}"
            )

    def note(self, text: str) -> None:
        """A line that nobody asked for."""
        if not self._quiet:
            self._line(text, style="dim")

    def complain(self, error: Exception) -> None:
        """One line, as every command of the program has it."""
        self._live.stop()
        self._line("error: " + " ".join(str(error).splitlines()))

    def page(self, markdown: str) -> None:
        """Something that was asked for."""
        self._live.stop()
        if self._err.is_terminal:
            from rich.markdown import Markdown

            self._err.print(Markdown(printable(markdown)))
        else:
            self._line(markdown)

    def copy(self, text: str) -> None:
        """Hand text to the terminal's clipboard. Raises RequestError where there is no terminal."""
        if not self._err.is_terminal or self._err.is_dumb_terminal:
            raise RequestError("there is no terminal here whose clipboard could be written")
        # OSC 52, which goes through ssh as well.
        sys.stderr.write(f"\x1b]52;c;{base64.b64encode(text.encode()).decode()}\a")
        sys.stderr.flush()

    def _line(self, text: str, style: str = "") -> None:
        # Text, not markup: a title may hold brackets. soft_wrap: a line stays one line in a log.
        self._err.print(Text(printable(text), style=style), soft_wrap=True)
