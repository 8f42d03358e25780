"""Widget of an answer in the transcript: streamed Markdown, folded reasoning, tokens coloured by source."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby

from textual import events, on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from offspec.chat.branches import Fork
from offspec.core.events import Piece
from offspec.ui.chat.reasoning import Part, split_reasoning
from offspec.ui.printable import printable
from offspec.ui.tui.markdown import StreamedMarkdown
from offspec_planners.units import format_count

_BETWEEN = 1 / 30  # minimum seconds between two repaints
_SHARE = 48  # the pause after a repaint is this multiple of its cost, to leave the CPU to the model
_LONGEST = 0.6  # maximum pause in seconds
_ENDINGS = {
    "halted": "⋯ stopped",
    "length": "⋯ stopped at max_tokens; /set max_tokens=N raises it",
    "context": "⋯ the context is full; the next question drops the first ones",
    "failed": "⋯ ended by an error",
}
_NO_TEXT = "⋯ empty answer"
# Underlined as well as coloured, for terminals without colour and colour-blind users.
_BONUS = "$text-warning underline"
_DRAFT = "$text-success"

LEGEND = "underlined: bonus tokens, one per pass, added by the target; all others are draft tokens"


@dataclass(slots=True)
class AnswerState:
    """Content of an answer. template_prefix: its beginning, written by the chat template."""

    text: str = ""
    template_prefix: str = ""
    pieces: list[Piece] = field(default_factory=list)
    ending: str = ""  # line below the answer: stopped, cut off, failed
    finished: bool = False
    fork: Fork | None = None  # versions of its turn, if there are several


class ReasoningBlock(Vertical):
    """Reasoning: folded to a line, opened with a click or F2. The text is laid out only while it is open.

    Textual's Collapsible takes the focus from the composer, scrolls when it is opened, and lays out the whole
    screen for each word that its title counts.
    """

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part
        self.collapsed = True
        self._title = Static("", markup=False, classes="title")
        self._thought = Static("", markup=False, classes="thought")

    def compose(self) -> ComposeResult:
        yield self._title
        yield self._thought

    def on_mount(self) -> None:
        self._show()

    @property
    def title(self) -> str:
        """Text of the title line."""
        words = format_count(len(self.part.text.split()), "word")
        return f"thinking, {words}{'' if self.part.closed else ' …'}"

    def set_source(self, part: Part) -> bool:
        """Show this state of the part. Return False if the part is not reasoning."""
        if part.kind == "thinking" and part != self.part:
            self.part = part
            self._show()
        return part.kind == "thinking"

    @on(events.Click, ".title")
    def toggle(self) -> None:
        """Open or fold the block."""
        self.collapsed = not self.collapsed
        self._thought.display = not self.collapsed
        self._show()

    def _show(self) -> None:
        self._title.update(Content(f"{'▸' if self.collapsed else '▾'} {self.title}"), layout=False)
        if not self.collapsed:
            self._thought.update(Content(self.part.text.strip()))


class Answer(Vertical):
    """Widget of an answer. sources: show the source of each token instead of Markdown, if known."""

    def __init__(self, state: AnswerState, *, sources: bool = False) -> None:
        super().__init__(classes="answer")
        self.state = state
        self.sources = sources
        self.painted = 0
        self._fresh, self._over = asyncio.Event(), asyncio.Event()
        self._painting = asyncio.Lock()
        self._blocks: list[StreamedMarkdown | ReasoningBlock] = []
        self._tokens: Static | None = None
        self._ending = Static("", markup=False, classes="ending")
        self._versions = Static("", markup=False, classes="versions")

    async def on_mount(self) -> None:
        await self.mount_all([self._ending, self._versions])
        await self._paint()
        if not self.state.finished:
            self.run_worker(self._keep_up(), exit_on_error=True)

    def write(self, text: str, pieces: tuple[Piece, ...]) -> None:
        """Append text, which is painted later."""
        self.state.text += printable(text)
        self.state.pieces.extend(pieces)
        self._fresh.set()

    def finish(self, ending: str = "", fork: Fork | None = None) -> None:
        """Finish the answer. fork: versions of its turn, if there are several."""
        self.state.ending, self.state.fork, self.state.finished = ending, fork, True
        self._fresh.set()
        self._over.set()

    def show_sources(self, shown: bool) -> None:
        self.sources = shown
        if self.state.finished:
            self.run_worker(self._paint())
        else:
            self._fresh.set()

    def toggle(self) -> None:
        """Open all reasoning blocks, or fold them if all are open."""
        blocks = [block for block in self._blocks if isinstance(block, ReasoningBlock)]
        fold = all(not block.collapsed for block in blocks)
        for block in blocks:
            if block.collapsed != fold:
                block.toggle()

    async def _keep_up(self) -> None:
        """Paint new text until the answer is over, and then once more."""
        over = False
        while not over:
            await self._fresh.wait()
            self._fresh.clear()
            over = self.state.finished
            began = time.thread_time()
            await self._paint()
            if not over:
                await self._pause(_BETWEEN)  # time for the screen to be laid out and drawn
                await self._pause(min(_SHARE * (time.thread_time() - began), _LONGEST))

    async def _pause(self, seconds: float) -> None:
        """Wait for this time, or until the answer is over."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)

    async def _paint(self) -> None:
        async with self._painting:
            await self._paint_all()

    async def _paint_all(self) -> None:
        self.painted += 1
        coloured_now = self.sources and bool(self.state.pieces)
        if coloured_now:
            await self._paint_tokens()
        else:
            await self._paint_parts()
        for block in self._blocks:
            block.display = not coloured_now
        if self._tokens is not None:
            self._tokens.display = coloured_now
        ending = self.state.ending or ("" if self.state.text.strip() or not self.state.finished else _NO_TEXT)
        self._ending.update(Content(ending))
        self._ending.display = bool(ending)
        if self.state.fork is not None:
            self._versions.update(versions_line(self.state.fork))
        self._versions.display = self.state.fork is not None

    async def _paint_tokens(self) -> None:
        if self._tokens is None:
            self._tokens = Static("", markup=False, classes="tokens")
            await self.mount(self._tokens, before=self._ending)
        self._tokens.update(highlight_sources(self.state.pieces))

    async def _paint_parts(self) -> None:
        parts = split_reasoning(self.state.text, self.state.template_prefix)
        for place, part in enumerate(parts):
            if place == len(self._blocks) or not _update_block(self._blocks[place], part):
                await self._drop(place)
                block = ReasoningBlock(part) if part.kind == "thinking" else StreamedMarkdown(part.text)
                self._blocks.append(block)
                await self.mount(block, before=self._ending)
        await self._drop(len(parts))

    async def _drop(self, place: int) -> None:
        for block in self._blocks[place:]:
            await block.remove()
        del self._blocks[place:]


def _update_block(block: StreamedMarkdown | ReasoningBlock, part: Part) -> bool:
    """Show the part in the block. Return False if the block is of another kind."""
    if isinstance(block, ReasoningBlock):
        return block.set_source(part)
    return part.kind == "text" and block.set_source(part.text)


def ending_line(finish: str | None) -> str:
    """Return a line for answers that the model did not end itself; "" for others."""
    return _ENDINGS.get(finish or "", "")


def versions_line(fork: Fork) -> Content:
    """Return the number of the version between arrows that switch versions on a click."""
    now, last = fork.active, len(fork.versions) - 1
    left = f"[@click=app.switch({now - 1},{fork.at})]←[/]" if now else " "
    right = f"[@click=app.switch({now + 1},{fork.at})]→[/]" if now < last else " "
    return Content.from_markup(f"{left} {now + 1} of {last + 1} {right}")


def highlight_sources(pieces: Sequence[Piece]) -> Content:
    """Return the printable text of the pieces, with a styled span for each run of one source."""
    runs = groupby((piece for piece in pieces if piece.text), key=lambda piece: piece.source)
    return Content.assemble(
        *(
            (printable("".join(piece.text for piece in run)), _BONUS if source == "bonus" else _DRAFT)
            for source, run in runs
        )
    )
