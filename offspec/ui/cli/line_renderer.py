"""Output of the line mode: answers on stdout, everything else on stderr, pages as Markdown."""

import base64
import json
import sys
from typing import TYPE_CHECKING, Literal

from offspec.chat.archive import SessionArchive
from offspec.chat.conversation import Conversation
from offspec.core.errors import RequestError
from offspec.core.events import FinishReason, Result, TextDelta, TreeSeen
from offspec.ui.chat.commands import COMMANDS
from offspec.ui.chat.controller import ChatController
from offspec.ui.chat.reasoning import without_reasoning
from offspec.ui.chat.report import report
from offspec.ui.cli.console import Console
from offspec.ui.cli.output import LiveLine, StdoutWriter
from offspec.ui.messages import user_message
from offspec.ui.printable import printable
from offspec_planners.units import format_count, format_seconds

if TYPE_CHECKING:
    from offspec_planners.plan import Plan

_BESIDE = 3  # rejected draft tokens shown next to an accepted one
_SESSIONS = 20
_TURNS = 3  # turns shown of a resumed conversation
_UNDERLINED = "\x1b[4m{}\x1b[24m"
_ENDINGS: dict[FinishReason, str] = {
    "eos": "",
    "stop": "",
    "length": "; stopped at max_tokens (change it with /set)",
    "context": "; the context is full: the next question drops the first ones",
    "halted": "; stopped; the partial answer is kept",
}


class LineRenderer:
    """Renderer of the line mode.

    Args:
        quiet: Whether stderr has only errors, lost data, and output of commands.

    Attributes:
        live: Live status line on stderr.
        sources: Whether bonus tokens of the target are underlined, on a terminal.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._out = StdoutWriter()
        self._err = Console(stderr=True, highlight=False)
        self._quiet = quiet
        self.live = LiveLine(self._err, wanted=not quiet and sys.stderr.isatty())
        self._text_is_open = False
        self.sources = False

    def status(self, line: str) -> None:
        """Show a status line, unless it would overwrite an answer."""
        if line and not self._text_is_open:
            self.live.status(line)

    def text(self, delta: TextDelta) -> None:
        """Write a part of an answer. Raises StdoutClosed, and DiskFullError if stdout is a file."""
        if not delta.text:
            return
        if self._out.is_terminal:
            self.live.stop()
            self._text_is_open = True
        if self._out.is_terminal and self.sources:
            for piece in delta.pieces:
                shown = printable(piece.text)
                self._out.write_styled(_UNDERLINED.format(shown) if piece.source == "bonus" else shown)
        else:
            self._out.write(delta.text)

    def end_answer(self, result: Result | None) -> None:
        """End the answer. Raises StdoutClosed and DiskFullError. result: None if the answer failed."""
        self.live.stop()
        self._text_is_open = False
        self._out.end_line()
        if result is not None:
            paused = f", drafting paused in {result.paused_passes} passes" if result.paused_passes else ""
            self.note(
                f"{result.tokens:,} tokens in {format_seconds(result.seconds, 1)}, "
                f"{result.tok_per_s:.2f} tok/s, "
                f"{result.tokens_per_pass:.1f} per pass{paused}{_ENDINGS[result.finish_reason]}"
            )

    def note(self, text: str) -> None:
        """Print a notice, except with --quiet."""
        if not self._quiet:
            self._err.print_line(text, style="dim")

    def warn(self, text: str) -> None:
        """Print a warning with --quiet only; otherwise `note` prints it."""
        if self._quiet:
            self.live.stop()
            self._err.print_line(text)

    def end_of(self, conversation: Conversation) -> None:
        """Print the last turns of a resumed conversation."""
        messages = conversation.messages
        shown = messages[-2 * _TURNS :]
        if len(messages) > len(shown):
            self.note(f"... {(len(messages) - len(shown)) // 2} earlier questions")
        for message in shown:
            text = without_reasoning(message.content, message.opened).strip()
            self.note(f"> {text}" if message.role == "user" else f"{text}\n")

    def error(self, error: Exception) -> None:
        """Print an error in one line, like every command of the program."""
        self.live.stop()
        self._err.print_line("error: " + " ".join(user_message(error).splitlines()))

    def page(self, markdown: str) -> None:
        """Print the output of a command."""
        self.live.stop()
        if self._err.is_terminal:
            from rich.markdown import Markdown

            from offspec.ui.markdown_parser import markdown_parser

            shown = Markdown("")
            shown.parsed = markdown_parser().parse(printable(markdown))
            self._err.print(shown)
        else:
            self._err.print_line(markdown)

    def plan(self, plan: "Plan") -> None:
        """Print a plan like `offspec plan`."""
        from offspec.ui.cli.plan_page import render  # imported late: it needs numpy

        self.live.stop()
        sys.stderr.write(render(Console(stderr=True, highlight=False), plan))
        sys.stderr.flush()

    def copy(self, text: str) -> None:
        """Copy text to the terminal's clipboard. Raises RequestError if there is no terminal."""
        if not self._err.is_terminal or self._err.is_dumb_terminal:
            raise RequestError(
                "cannot copy: stderr is not a terminal with a clipboard; run this in a terminal"
            )
        # OSC 52 also works over ssh.
        sys.stderr.write(f"\x1b]52;c;{base64.b64encode(text.encode()).decode()}\a")
        sys.stderr.flush()


def page(view: Literal["help", "tree", "stats", "sessions"], controller: ChatController) -> str:
    """Return a view in Markdown for which the terminal UI has a screen."""
    match view:
        case "help":
            return _help_page()
        case "tree":
            return _tree_page(controller.trees[-1])
        case "stats":
            return report(controller)
        case "sessions":
            return _sessions_page(controller.archive)


def _help_page() -> str:
    """Return the list of commands and the syntax of questions."""
    commands = [f"- `{command.usage}`: {command.help}" for command in COMMANDS.values()]
    return "\n".join(
        (
            *commands,
            "",
            "Each line is a question. A line that ends in `\\` continues on the next; enclose a question of "
            'several lines in lines of `"""`. Ctrl-C stops an answer; at the prompt it discards the line, '
            "and a second one exits.",
        )
    )


def _tree_page(tree: TreeSeen) -> str:
    """Return the accepted path with the rejected tokens at each step."""
    lines = []
    for step, (above, node) in enumerate(zip(tree.accepted, tree.accepted[1:], strict=False), 1):
        lines.append(f"{step:>3}  {_node(tree, node):<28}{_rejected_children(tree, above, node)}")
    bonus = f"{_quoted(tree.bonus)} by the target"
    lines.append(f"  +  {bonus:<28}{_rejected_children(tree, tree.accepted[-1], None)}")
    head = f"Pass {tree.index}: {format_count(len(tree.parent), 'node')}; accepted path:"
    return "\n".join((head, "", "```text", *(line.rstrip() for line in lines), "```"))


def _rejected_children(tree: TreeSeen, above: int, taken: int | None) -> str:
    """Return the most likely rejected tokens below a node."""
    others = [i for i, parent in enumerate(tree.parent) if parent == above and i != taken]
    others.sort(key=lambda i: -tree.probability[i])
    return f"  not {', '.join(_node(tree, i) for i in others[:_BESIDE])}" if others else ""


def _node(tree: TreeSeen, node: int) -> str:
    return f"{_quoted(tree.text[node])} {tree.probability[node]:.2f}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _sessions_page(archive: SessionArchive) -> str:
    """Return the latest conversations, most recently changed first."""
    entries = archive.list()
    unread = [f"- {damaged.reason}" for damaged in archive.damaged]
    if not entries:
        return "\n".join(["No conversation is saved yet.", *unread])
    lines = [
        f"- **{entry.title}**, {entry.turns} question{'' if entry.turns == 1 else 's'} to {entry.model}, "
        f"{entry.updated} (`{entry.id}`)"
        for entry in entries[:_SESSIONS]
    ]
    if len(entries) > _SESSIONS:
        lines.append(f"- and {len(entries) - _SESSIONS} more in `{archive.folder}`")
    lines += unread
    return "\n".join((*lines, "", "`/load NAME` continues one; the beginning of its id works too."))
