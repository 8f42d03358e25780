"""What the keys do, and the commands."""

from offspec.ui.chat.commands import COMMANDS
from offspec.ui.tui.page_screen import PageScreen

KEYS = (
    ("Enter", "send the question"),
    ("Shift+Enter, Ctrl+J", "a new line in it"),
    ("Tab", "complete a command"),
    ("↑ ↓", "earlier and later questions, from the first and last line"),
    ("Esc", "stop the answer; what came is kept"),
    ("Ctrl+R", "ask the last question again"),
    ("Ctrl+T", "the tree of the last pass, and those before it"),
    ("Ctrl+O", "colour the answers' tokens by where they came from"),
    ("Ctrl+B", "show or hide the side panel"),
    ("Ctrl+L", "begin a new conversation"),
    ("F2", "open or fold thinking"),
    ("Page Up, Page Down", "scroll the conversation"),
    ("Ctrl+P", "themes and more"),
    ("F1", "this page"),
    ("Ctrl+C", "stop the answer, or leave when pressed twice"),
    ("Ctrl+Q", "leave; the conversation is saved"),
)


class HelpScreen(PageScreen):
    """The keys first: whoever looks for a command has the keyboard under the hands already."""

    def __init__(self) -> None:
        super().__init__("Help", help_page())


def help_page() -> str:
    """Keys and commands as Markdown."""
    keys = "\n".join(f"| {key} | {what} |" for key, what in KEYS)
    commands = "\n".join(
        f"| `{command.usage.replace('|', chr(92) + '|')}` | {command.help} |" for command in COMMANDS.values()
    )
    return f"| key | |\n|---|---|\n{keys}\n\n| command | |\n|---|---|\n{commands}\n"
