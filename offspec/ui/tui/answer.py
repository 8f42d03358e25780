"""An answer in the transcript: Markdown that grows, thinking folded, or tokens coloured by source."""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field

from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from offspec.core.events import Piece
from offspec.ui.chat.thinking import Part, split
from offspec.ui.printable import printable
from offspec.ui.tui.prose import Prose
from offspec.ui.tui.sources import coloured
from offspec.ui.tui.thinking_block import ThinkingBlock

_BETWEEN = 1 / 30  # seconds between two paintings, at least
_SHARE = 48  # and this many times what one costs, until it is on the screen: the machine is for the model
_LONGEST = 0.6  # but no more than so many seconds
_ENDINGS = {
    "halted": "⋯ stopped",
    "length": "⋯ as long as max_tokens allows; /set max_tokens=N allows more",
    "context": "⋯ the context is full; /undo or /clear makes room",
    "failed": "⋯ broken off by an error",
}


@dataclass(slots=True)
class Said:
    """What there is to show of an answer. opened: what the chat template began it with."""

    text: str = ""
    opened: str = ""
    pieces: list[Piece] = field(default_factory=list)
    ending: str = ""  # a line below it: stopped, cut off, failed
    over: bool = False


class Answer(Vertical):
    """sources: show where the tokens came from in place of Markdown, where that is known."""

    def __init__(self, said: Said, *, sources: bool = False) -> None:
        super().__init__(classes="answer")
        self.said = said
        self.sources = sources
        self.painted = 0
        self._fresh, self._over = asyncio.Event(), asyncio.Event()
        self._painting = asyncio.Lock()
        self._blocks: list[Prose | ThinkingBlock] = []
        self._tokens: Static | None = None
        self._ending = Static("", markup=False, classes="ending")

    async def on_mount(self) -> None:
        await self.mount(self._ending)
        await self._paint()
        if not self.said.over:
            self.run_worker(self._keep_up(), exit_on_error=True)

    def write(self, text: str, pieces: tuple[Piece, ...]) -> None:
        """Text to be added. It is painted when there is time."""
        self.said.text += printable(text)
        self.said.pieces.extend(pieces)
        self._fresh.set()

    def finish(self, ending: str = "") -> None:
        self.said.ending, self.said.over = ending, True
        self._fresh.set()
        self._over.set()

    def show_sources(self, shown: bool) -> None:
        self.sources = shown
        if self.said.over:
            self.run_worker(self._paint())
        else:
            self._fresh.set()

    def toggle(self) -> None:
        """Open every thinking block, or fold them where all are open."""
        blocks = [block for block in self._blocks if isinstance(block, ThinkingBlock)]
        fold = all(not block.collapsed for block in blocks)
        for block in blocks:
            block.collapsed = fold

    async def _keep_up(self) -> None:
        """Paint what is new until the answer is over, and then once more."""
        over = False
        while not over:
            await self._fresh.wait()
            self._fresh.clear()
            over = self.said.over
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
        coloured_now = self.sources and bool(self.said.pieces)
        if coloured_now:
            await self._paint_tokens()
        else:
            await self._paint_parts()
        for block in self._blocks:
            block.display = not coloured_now
        if self._tokens is not None:
            self._tokens.display = coloured_now
        if self.said.ending:
            self._ending.update(Content(self.said.ending))
        self._ending.display = bool(self.said.ending)

    async def _paint_tokens(self) -> None:
        if self._tokens is None:
            self._tokens = Static("", markup=False, classes="tokens")
            await self.mount(self._tokens, before=self._ending)
        self._tokens.update(coloured(self.said.pieces))

    async def _paint_parts(self) -> None:
        parts = split(self.said.text, self.said.opened)
        for place, part in enumerate(parts):
            if place == len(self._blocks) or not await _goes_on(self._blocks[place], part):
                await self._drop(place)
                block = ThinkingBlock(part) if part.kind == "thinking" else Prose(part.text)
                self._blocks.append(block)
                await self.mount(block, before=self._ending)
        await self._drop(len(parts))

    async def _drop(self, place: int) -> None:
        for block in self._blocks[place:]:
            await block.remove()
        del self._blocks[place:]


async def _goes_on(block: Prose | ThinkingBlock, part: Part) -> bool:
    """Let the block show the part; False where it is not made for it."""
    if isinstance(block, ThinkingBlock):
        return part.kind == "thinking" and await block.become(part)
    return part.kind == "text" and block.become(part.text)


def ending_of(finish: str | None) -> str:
    """A line for answers that did not come to their own end; empty for the others."""
    return _ENDINGS.get(finish or "", "")
