"""Input field: several lines, earlier questions with the arrow keys, completion with tab."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import TextArea

from offspec.ui.chat.completion import Completion
from offspec.ui.tui.completion import CompletionList

_LINE_END = re.compile("\r\n|[\r\v\f\x1c\x1d\x1e\x85\u2028\u2029]")  # line ends of `str.splitlines`
_TOGETHER = 1000  # maximum number of letters inserted by one edit


class Composer(TextArea):
    """Input field. Enter sends; Shift+Enter, Ctrl+J and Alt+Enter begin a line. Empty, ← → switch versions.

    complete: function that completes a line beginning with "/". recalled: earlier input, the oldest first.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("pageup", "app.page(-1)", show=False),
        Binding("pagedown", "app.page(1)", show=False),
        # Names of Ctrl+_ without and with the kitty keyboard protocol.
        Binding("ctrl+underscore,ctrl+shift+underscore,ctrl+shift+minus", "undo", show=False),
    ]

    @dataclass
    class Submitted(Message):
        """The user sent this text."""

        text: str

    @dataclass
    class VersionStepped(Message):
        """The user switched to an earlier or later version in the empty input. by: -1 or 1."""

        by: int

    def __init__(self, choices: CompletionList, complete: Callable[[str], Sequence[Completion]]) -> None:
        super().__init__(
            id="composer",
            placeholder="Ask a question, or type / for commands",
            highlight_cursor_line=False,
            compact=True,
        )
        self._choices, self._complete = choices, complete
        self.recalled: list[str] = []
        self._at: int | None = None  # in `recalled`; None while the user's own text is shown
        self._own = ""
        self._offered_for = ""
        self._before_edit: str | None = None  # text before `begin_edit`
        self._typed = ""  # letters collected for one edit

    def set_text(self, text: str) -> None:
        """Show this text, with the cursor at its end."""
        self.text = text
        self.move_cursor(self.document.end)

    def prepend(self, text: str) -> None:
        """Insert unsent text before the text written since."""
        self._at = None
        self.set_text(f"{text}\n{self.text}" if self.text else text)

    def begin_edit(self, line: str) -> None:
        """Show a line for the user to edit and send; `leave_edit` cancels."""
        self._before_edit, self._at = self.text, None
        self.set_text(line)

    def leave_edit(self) -> bool:
        """Restore the text before `begin_edit`. Return False if no edit was begun."""
        before, self._before_edit = self._before_edit, None
        if before is not None:
            self.set_text(before)
        return before is not None

    def dismiss(self) -> bool:
        """Close the list of completions. Return False if it was not open."""
        was_open = self._choices.display
        self._choices.hide()
        return was_open

    async def on_event(self, event: events.Event) -> None:
        """Insert collected letters before handling any other event."""
        if not (isinstance(event, events.Key) and event.is_printable):
            self._put_typed()
        await super().on_event(event)

    def _wait(self, event: events.Key) -> bool:
        """Collect a letter if more letters are queued. Return False if there are none.

        An edit takes 0.5 ms, and a terminal without bracketed paste sends pasted text as single keys.
        """
        more = self.message_queue_size > 0 and len(self._typed) < _TOGETHER
        if not (more or self._typed) or event.character is None:
            return False
        if not self._typed:
            self.call_later(self._put_typed)  # in case no further event follows
        self._typed += event.character
        if not more:
            self._put_typed()
        return True

    def _put_typed(self) -> None:
        typed, self._typed = self._typed, ""
        if typed:
            self._put(typed)

    def _put(self, text: str) -> None:
        self.replace(text, *self.selection, maintain_selection_offset=False)
        self.call_after_refresh(self.scroll_cursor_visible)  # after the layout made room for the text

    async def _on_key(self, event: events.Key) -> None:
        """Handle keys whose meaning depends on the text. As bindings they could overtake letters."""
        if event.is_printable and self._wait(event):
            event.stop()
            event.prevent_default()
            return
        acts: dict[str, Callable[[], object]] = {
            "enter": self._send,
            **dict.fromkeys(("shift+enter", "ctrl+j", "alt+enter"), partial(self.insert, "\n")),
            "tab": self._complete_line,
            "up": self._up,
            "down": self._down,
            "ctrl+u": self._empty,
        }
        if not self.text:
            acts["left"] = partial(self.post_message, self.VersionStepped(-1))
            acts["right"] = partial(self.post_message, self.VersionStepped(1))
        if event.key in acts:
            event.stop()
            event.prevent_default()
            acts[event.key]()
        elif await self._run_own_binding(event.key):
            event.stop()
            event.prevent_default()

    async def _run_own_binding(self, key: str) -> bool:
        """Run the editing or cursor action of a key. Return whether there was one.

        The app would run it only after the key bubbled up, when letters typed meanwhile are already inserted.
        """
        actions = [binding.action for binding in self._bindings.key_to_bindings.get(key, ())]
        return any([await self.app.run_action(action, self) for action in actions if "." not in action])

    def _send(self) -> None:
        self._offer()
        if (choice := self._choices.selected_line()) is not None:
            self._take(choice)
            return
        text = self.text.lstrip("\n").rstrip()  # a space before a slash marks a question, so it is kept
        if not text:
            return
        if not self.recalled or self.recalled[-1] != text:
            self.recalled.append(text)
        self._at = self._before_edit = None
        self.clear()
        self.dismiss()
        self.post_message(self.Submitted(text))

    def _empty(self) -> None:
        self.clear()
        self.dismiss()

    def _complete_line(self) -> None:
        """Take a single completion, or the common prefix of several; further tabs step through the list."""
        self._offer()
        if not self._choices.display:
            self._choices.offer(self._complete(self.text))
        if len(self._choices.offered) == 1:
            self._take(self._choices.offered[0].text)
        elif self._choices.common_prefix() not in ("", self.text):
            self.set_text(self._choices.common_prefix())
        else:
            self._choices.action_cursor_down()

    def _up(self) -> None:
        if self._choices.display:
            self._choices.action_cursor_up()
        elif not self.navigator.is_first_wrapped_line(self.cursor_location):
            self.action_cursor_up()
        else:
            self._recall(-1)

    def _down(self) -> None:
        if self._choices.display:
            self._choices.action_cursor_down()
        elif not self.navigator.is_last_wrapped_line(self.cursor_location):
            self.action_cursor_down()
        else:
            self._recall(1)

    def on_text_area_changed(self, event: TextArea.Changed) -> None:
        """Offer completions while a command is typed."""
        event.stop()
        self._offer()

    def _offer(self) -> None:
        """Offer completions if the line changed since the last offer: keys can overtake Changed events."""
        line = self.text
        if line == self._offered_for:
            return
        self._offered_for = line
        wanted = line.startswith("/") and not line.startswith("//") and "\n" not in line
        self._choices.offer([c for c in self._complete(line) if c.text != line] if wanted else ())

    def on_completion_list_accepted(self, message: CompletionList.Accepted) -> None:
        self._take(message.line)

    async def _on_paste(self, event: events.Paste) -> None:
        """Insert pasted text with normalized line ends: terminals send \\r, and Textual drops some."""
        event.stop()
        event.prevent_default()
        self._put(_LINE_END.sub("\n", event.text))

    def _take(self, line: str) -> None:
        self.set_text(line)
        self._offered_for = line
        self._choices.hide()

    def _recall(self, by: int) -> None:
        """Step through earlier input; after the latest comes the user's unsent text."""
        if not self.recalled or (self._at is None and by > 0):
            return
        if self._at is None or self.text != self.recalled[self._at]:
            self._own = self.text  # recalled text that was edited counts as unsent text
        at = len(self.recalled) if self._at is None else self._at
        at = max(at + by, 0)
        self._at = at if at < len(self.recalled) else None
        self.set_text(self._own if self._at is None else self.recalled[at])
        self.dismiss()
