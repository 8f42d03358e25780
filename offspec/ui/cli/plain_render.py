"""What the line mode shows: answers on stdout, everything else on stderr, pages as Markdown."""

import base64
import json
import sys
from typing import TYPE_CHECKING, Literal

from offspec.chat.archive import Archive
from offspec.chat.conversation import Conversation
from offspec.core.errors import RequestError
from offspec.core.events import FinishReason, Result, TextDelta, TreeSeen
from offspec.ui.chat.commands import COMMANDS
from offspec.ui.chat.controller import ChatController
from offspec.ui.chat.report import report
from offspec.ui.chat.thinking import without_thinking
from offspec.ui.cli.console import Console
from offspec.ui.cli.output import Live, Output
from offspec.ui.printable import printable
from offspec.ui.told import told
from offspec_planners.units import format_count, format_seconds

if TYPE_CHECKING:
    from offspec_planners.plan import Plan

_BESIDE = 3  # rejected guesses shown beside an accepted one
_SESSIONS = 20
_TURNS = 3  # of a resumed conversation
_UNDERLINED = "\x1b[4m{}\x1b[24m"
_ENDINGS: dict[FinishReason, str] = {
    "eos": "",
    "stop": "",
    "length": "; cut at max_tokens, which /set changes",
    "context": "; the context is full: the next question leaves the first ones out",
    "halted": "; stopped, and kept as far as it came",
}


class PlainRenderer:
    """quiet: errors, losses, and what a command was asked for, are all there is on stderr.

    live: the line that moves. sources: whether tokens that the target added are underlined, on a terminal.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._out = Output()
        self._err = Console(stderr=True, highlight=False)
        self._quiet = quiet
        self.live = Live(self._err, wanted=not quiet and sys.stderr.isatty())
        self._text_is_open = False
        self.sources = False

    def moving(self, line: str) -> None:
        """What the machine is doing; nothing where that would write over an answer."""
        if line and not self._text_is_open:
            self.live.status(line)

    def text(self, delta: TextDelta) -> None:
        """A part of an answer. Raises StdoutClosed, and DiskFullError where stdout is a file."""
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
        """The answer is over. result: None where it failed. Raises as `text` does."""
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
        """A line that was not asked for."""
        if not self._quiet:
            self._err.print_line(text, style="dim")

    def urge(self, text: str) -> None:
        """A note that is told with --quiet, too, and by `note` without."""
        if self._quiet:
            self.live.stop()
            self._err.print_line(text)

    def end_of(self, conversation: Conversation) -> None:
        """The last turns of a conversation that goes on."""
        said = conversation.messages
        shown = said[-2 * _TURNS :]
        if len(said) > len(shown):
            self.note(f"... {(len(said) - len(shown)) // 2} earlier questions")
        for message in shown:
            spoken = without_thinking(message.content, message.opened).strip()
            self.note(f"> {spoken}" if message.role == "user" else f"{spoken}\n")

    def complain(self, error: Exception) -> None:
        """One line, as every command of the program has it."""
        self.live.stop()
        self._err.print_line("error: " + " ".join(told(error).splitlines()))

    def page(self, markdown: str) -> None:
        """Something that was asked for."""
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
        """A plan that was asked for, as `offspec plan` prints it."""
        from offspec.ui.cli.plan_page import render  # only now: it needs numpy

        self.live.stop()
        sys.stderr.write(render(Console(stderr=True, highlight=False), plan))
        sys.stderr.flush()

    def copy(self, text: str) -> None:
        """Hand text to the terminal's clipboard. Raises RequestError where there is no terminal."""
        if not self._err.is_terminal or self._err.is_dumb_terminal:
            raise RequestError("there is no terminal here whose clipboard could be written")
        # OSC 52, which goes through ssh as well.
        sys.stderr.write(f"\x1b]52;c;{base64.b64encode(text.encode()).decode()}\a")
        sys.stderr.flush()


def page(view: Literal["help", "tree", "stats", "sessions"], controller: ChatController) -> str:
    """A view that the terminal UI has a screen for, in Markdown."""
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
    """All commands, and how questions are written."""
    commands = [f"- `{command.usage}`: {command.help}" for command in COMMANDS.values()]
    return "\n".join(
        (
            *commands,
            "",
            "A line is a question. One that ends in `\\` continues in the next; a question of many lines "
            'goes between two lines of `"""`. Ctrl-C stops an answer; where there is none, it discards the '
            "line, and a second one leaves.",
        )
    )


def _tree_page(tree: TreeSeen) -> str:
    """The accepted path, and the rejected tokens beside each of its steps."""
    lines = []
    for step, (above, node) in enumerate(zip(tree.accepted, tree.accepted[1:], strict=False), 1):
        lines.append(f"{step:>3}  {_node(tree, node):<28}{_beside(tree, above, node)}")
    bonus = f"{_quoted(tree.bonus)} by the target"
    lines.append(f"  +  {bonus:<28}{_beside(tree, tree.accepted[-1], None)}")
    head = f"Pass {tree.index}: {format_count(len(tree.parent), 'node')}, and the path that was taken."
    return "\n".join((head, "", "```text", *(line.rstrip() for line in lines), "```"))


def _beside(tree: TreeSeen, above: int, taken: int | None) -> str:
    """The likeliest rejected tokens below a node."""
    others = [i for i, parent in enumerate(tree.parent) if parent == above and i != taken]
    others.sort(key=lambda i: -tree.probability[i])
    return f"  not {', '.join(_node(tree, i) for i in others[:_BESIDE])}" if others else ""


def _node(tree: TreeSeen, node: int) -> str:
    return f"{_quoted(tree.text[node])} {tree.probability[node]:.2f}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _sessions_page(archive: Archive) -> str:
    """The latest conversations, those that changed last first."""
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
    return "\n".join((*lines, "", "`/load` and a name, or the beginning of an id, goes on with one."))
