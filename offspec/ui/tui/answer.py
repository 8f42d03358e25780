"""An answer in the transcript: Markdown that grows, thinking folded, or tokens coloured by source."""

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
from offspec.ui.chat.thinking import Part, split
from offspec.ui.printable import printable
from offspec.ui.tui.markdown import StreamedMarkdown
from offspec_planners.units import format_count

_BETWEEN = 1 / 30  # seconds between two paintings, at least
_SHARE = 48  # and this many times what one costs, until it is on the screen: the machine is for the model
_LONGEST = 0.6  # but at most this many seconds
_ENDINGS = {
    "halted": "⋯ stopped",
    "length": "⋯ as long as max_tokens allows; /set max_tokens=N allows more",
    "context": "⋯ the context is full; the next question leaves the first ones out",
    "failed": "⋯ broken off by an error",
}
_NO_TEXT = "⋯ an answer without text"
# Underlined as well as coloured: the sign for terminals and eyes without colour.
_BONUS = "$text-warning underline"
_DRAFT = "$text-success"

LEGEND = "underlined: bonus tokens, one per pass, added by the target; the others are draft tokens"


@dataclass(slots=True)
class AnswerState:
    """What there is to show of an answer. opened: what the chat template began it with."""

    text: str = ""
    opened: str = ""
    pieces: list[Piece] = field(default_factory=list)
    ending: str = ""  # a line below it: stopped, cut off, failed
    over: bool = False
    fork: Fork | None = None  # the versions of its turn, where there are several


class ThinkingBlock(Vertical):
    """Thinking: folded to a line, and opened with a click or F2. The text is laid out only while it is open.

    Textual's Collapsible takes the keys away from the composer, scrolls where it is opened, and lays the
    whole screen out for each word that its title counts.
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
        """What the line says that is always there."""
        words = format_count(len(self.part.text.split()), "word")
        return f"thinking, {words}{'' if self.part.closed else ' …'}"

    def set_source(self, part: Part) -> bool:
        """Show the part as it is now; False where it is no thought."""
        if part.kind == "thinking" and part != self.part:
            self.part = part
            self._show()
        return part.kind == "thinking"

    @on(events.Click, ".title")
    def toggle(self) -> None:
        """Open it, or fold it again."""
        self.collapsed = not self.collapsed
        self._thought.display = not self.collapsed
        self._show()

    def _show(self) -> None:
        self._title.update(Content(f"{'▸' if self.collapsed else '▾'} {self.title}"), layout=False)
        if not self.collapsed:
            self._thought.update(Content(self.part.text.strip()))


class Answer(Vertical):
    """sources: show where the tokens came from in place of Markdown, where that is known."""

    def __init__(self, said: AnswerState, *, sources: bool = False) -> None:
        super().__init__(classes="answer")
        self.state = said
        self.sources = sources
        self.painted = 0
        self._fresh, self._over = asyncio.Event(), asyncio.Event()
        self._painting = asyncio.Lock()
        self._blocks: list[StreamedMarkdown | ThinkingBlock] = []
        self._tokens: Static | None = None
        self._ending = Static("", markup=False, classes="ending")
        self._versions = Static("", markup=False, classes="versions")

    async def on_mount(self) -> None:
        await self.mount_all([self._ending, self._versions])
        await self._paint()
        if not self.state.over:
            self.run_worker(self._keep_up(), exit_on_error=True)

    def write(self, text: str, pieces: tuple[Piece, ...]) -> None:
        """Text to be added. It is painted when there is time."""
        self.state.text += printable(text)
        self.state.pieces.extend(pieces)
        self._fresh.set()

    def finish(self, ending: str = "", fork: Fork | None = None) -> None:
        """Nothing more comes. fork: the versions of its turn, where there are several."""
        self.state.ending, self.state.fork, self.state.over = ending, fork, True
        self._fresh.set()
        self._over.set()

    def show_sources(self, shown: bool) -> None:
        self.sources = shown
        if self.state.over:
            self.run_worker(self._paint())
        else:
            self._fresh.set()

    def toggle(self) -> None:
        """Open every thinking block, or fold them where all are open."""
        blocks = [block for block in self._blocks if isinstance(block, ThinkingBlock)]
        fold = all(not block.collapsed for block in blocks)
        for block in blocks:
            if block.collapsed != fold:
                block.toggle()

    async def _keep_up(self) -> None:
        """Paint what is new until the answer is over, and then once more."""
        over = False
        while not over:
            await self._fresh.wait()
            self._fresh.clear()
            over = self.state.over
            began = time.thread_time()
            await self._paint()
            if not over:
                await self._pause(_BETWEEN)  # in which the screen is laid out and drawn
                await self._pause(min(_SHARE * (time.thread_time() - began), _LONGEST))

    async def _pause(self, seconds: float) -> None:
        """Wait so long, or until the answer is over."""
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
        ending = self.state.ending or ("" if self.state.text.strip() or not self.state.over else _NO_TEXT)
        self._ending.update(Content(ending))
        self._ending.display = bool(ending)
        if self.state.fork is not None:
            self._versions.update(versions_line(self.state.fork))
        self._versions.display = self.state.fork is not None

    async def _paint_tokens(self) -> None:
        if self._tokens is None:
            self._tokens = Static("", markup=False, classes="tokens")
            await self.mount(self._tokens, before=self._ending)
        self._tokens.update(by_source(self.state.pieces))

    async def _paint_parts(self) -> None:
        parts = split(self.state.text, self.state.opened)
        for place, part in enumerate(parts):
            if place == len(self._blocks) or not _goes_on(self._blocks[place], part):
                await self._drop(place)
                block = ThinkingBlock(part) if part.kind == "thinking" else StreamedMarkdown(part.text)
                self._blocks.append(block)
                await self.mount(block, before=self._ending)
        await self._drop(len(parts))

    async def _drop(self, place: int) -> None:
        for block in self._blocks[place:]:
            await block.remove()
        del self._blocks[place:]


def _goes_on(block: StreamedMarkdown | ThinkingBlock, part: Part) -> bool:
    """Let the block show the part; False if it is not made for it."""
    if isinstance(block, ThinkingBlock):
        return block.set_source(part)
    return part.kind == "text" and block.set_source(part.text)


def ending_of(finish: str | None) -> str:
    """A line for answers that did not come to their own end; empty for the others."""
    return _ENDINGS.get(finish or "", "")


def versions_line(fork: Fork) -> Content:
    """Which of the versions it is, between arrows that lead to the others, by a click too."""
    now, last = fork.active, len(fork.versions) - 1
    left = f"[@click=app.switch({now - 1},{fork.at})]←[/]" if now else " "
    right = f"[@click=app.switch({now + 1},{fork.at})]→[/]" if now < last else " "
    return Content.from_markup(f"{left} {now + 1} of {last + 1} {right}")


def by_source(pieces: Sequence[Piece]) -> Content:
    """The text of the pieces, of which no character can act on a terminal, with a span for each run."""
    runs = groupby((piece for piece in pieces if piece.text), key=lambda piece: piece.source)
    return Content.assemble(
        *(
            (printable("".join(piece.text for piece in run)), _BONUS if source == "bonus" else _DRAFT)
            for source, run in runs
        )
    )
