"""Small boxes over a screen that ask for a name, or for a yes."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from offspec.ui.printable import printable


class NameScreen(ModalScreen[str | None]):
    """Dismissed with the text of a field, or None.

    Args:
        title: The heading of the box.
        name: The text that the field begins with.
    """

    CSS_PATH = "prompt_screens.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,ctrl+c", "dismiss(None)", "Cancel")]

    def __init__(self, title: str, name: str) -> None:
        super().__init__()
        self._heading, self._name = title, printable(name)

    def compose(self) -> ComposeResult:
        with Vertical(classes="prompt") as box:
            box.border_title = self._heading
            box.border_subtitle = "enter accepts   esc cancels"
            yield Input(self._name, select_on_focus=False)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.dismiss(event.value)


class ConfirmScreen(ModalScreen[bool]):
    """Dismissed with whether the user pressed y.

    Args:
        title: The heading of the box.
        question: What y does.
    """

    CSS_PATH = "prompt_screens.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Yes"),
        Binding("n,escape,ctrl+c", "dismiss(False)", "No"),
    ]

    def __init__(self, title: str, question: str) -> None:
        super().__init__()
        self._heading, self._question = title, printable(question)

    def compose(self) -> ComposeResult:
        with Vertical(classes="prompt") as box:
            box.border_title = self._heading
            box.border_subtitle = "y yes   n no"
            yield Static(Content(self._question))
