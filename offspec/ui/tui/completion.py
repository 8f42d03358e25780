"""List of completions above the composer. The composer controls it; it never takes the focus."""

from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix

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
    """List that is shown while there are completions."""

    @dataclass
    class Accepted(Message):
        """The user clicked on a completion. Posted to the composer, which is not among the parents."""

        line: str

    def __init__(self) -> None:
        super().__init__(id="completion", markup=False)
        self.display = False
        self.offered: list[Completion] = []

    def offer(self, completions: Sequence[Completion]) -> None:
        """Show these completions, or hide the list if there are none."""
        self.offered = list(completions[:_MOST])
        self.clear_options()
        width = max((cell_len(choice.text) for choice in self.offered), default=0)
        self.add_options([Option(_row(choice, min(width, _WIDE))) for choice in self.offered])
        self.display = bool(self.offered)

    def hide(self) -> None:
        self.offer(())

    def selected_line(self) -> str | None:
        """Return the highlighted line, or None."""
        at = self.highlighted
        return None if at is None or not self.display else self.offered[at].text

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if event.option_index < len(self.offered):  # the clicked option may be gone by now
            line = self.offered[event.option_index].text
            self.screen.query_one("#composer").post_message(self.Accepted(line))

    def common_prefix(self) -> str:
        """Return the common prefix of all completions."""
        return commonprefix([choice.text for choice in self.offered])  # noqa: RUF071 - letter by letter


def _row(choice: Completion, width: int) -> Content:
    gap = " " * (max(width - cell_len(choice.text), 0) + 2)
    return Content.assemble(printable(choice.text), gap, (choice.help, "$text-muted"))
