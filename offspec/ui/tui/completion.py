"""The list of completions above the composer. The composer steers it; it never takes the focus."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from offspec.ui.chat.completion import Completion
from offspec.ui.printable import printable

_MOST = 50
_WIDE = 30  # columns at most before the help


class CompletionList(OptionList, can_focus=False):
    """Shows while there is something to choose from."""

    @dataclass
    class Taken(Message):
        """The user clicked on a completion. Posted to the composer, which is not among the parents."""

        line: str

    def __init__(self) -> None:
        super().__init__(id="completion", markup=False)
        self.display = False
        self._offered: list[Completion] = []

    @property
    def offered(self) -> Sequence[Completion]:
        return self._offered

    @property
    def shown(self) -> bool:
        return bool(self.display)

    def offer(self, completions: Sequence[Completion]) -> None:
        """Show these; nothing where there are none."""
        self._offered = list(completions[:_MOST])
        self.clear_options()
        width = max((cell_len(choice.text) for choice in self._offered), default=0)
        self.add_options([Option(_row(choice, min(width, _WIDE))) for choice in self._offered])
        self.display = bool(self._offered)

    def hide(self) -> None:
        self.offer(())

    def step(self, by: int) -> None:
        """Move to the next or the one before, around the ends."""
        count = len(self._offered)
        at = self.highlighted
        if count:
            self.highlighted = (-1 if by < 0 else 0) % count if at is None else (at + by) % count

    def chosen(self) -> str | None:
        """The line that the user moved to."""
        at = self.highlighted
        return None if at is None or not self.shown else self._offered[at].text

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if event.option_index < len(self._offered):  # what was clicked may be gone by now
            line = self._offered[event.option_index].text
            self.screen.query_one("#composer").post_message(self.Taken(line))

    def common(self) -> str:
        """What all completions begin with."""
        texts = [choice.text for choice in self._offered]
        shared = 0
        for letters in zip(*texts, strict=False):
            if len(set(letters)) > 1:
                break
            shared += 1
        return texts[0][:shared] if texts else ""


def _row(choice: Completion, width: int) -> Content:
    gap = " " * (max(width - cell_len(choice.text), 0) + 2)
    return Content.assemble(printable(choice.text), gap, (choice.help, "$text-muted"))
