"""Where the user writes: several lines, earlier questions with the arrow keys, completion with tab."""

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

_LINE_END = re.compile("\r\n|[\r\v\f\x1c\x1d\x1e\x85\u2028\u2029]")  # those of `str.splitlines`
_TOGETHER = 1000  # letters that are put in with one edit at most


class Composer(TextArea):
    """Enter sends; Shift+Enter, Ctrl+J and Alt+Enter begin a line. Empty, ← and → change versions.

    complete: what a line that begins with "/" may become. recalled: what was sent before, the oldest first.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("pageup", "app.page(-1)", show=False),
        Binding("pagedown", "app.page(1)", show=False),
        # Ctrl+_ as terminals send it, without and with the kitty keyboard protocol.
        Binding("ctrl+underscore,ctrl+shift+underscore,ctrl+shift+minus", "undo", show=False),
    ]

    @dataclass
    class Sent(Message):
        """The user sent this text."""

        text: str

    @dataclass
    class Turned(Message):
        """In the empty input the user went to an earlier or a later version. by: -1 or 1."""

        by: int

    def __init__(self, choices: CompletionList, complete: Callable[[str], Sequence[Completion]]) -> None:
        super().__init__(
            id="composer",
            placeholder="Ask something, or / for commands",
            highlight_cursor_line=False,
            compact=True,
        )
        self._choices, self._complete = choices, complete
        self.recalled: list[str] = []
        self._at: int | None = None  # in `recalled`; None while the user's own text is shown
        self._own = ""
        self._offered_for = ""
        self._before_edit: str | None = None  # what was here before a question that is being changed
        self._typed = ""  # letters that are put in together with those behind them

    def set_text(self, text: str) -> None:
        """Show this text, with the cursor at its end."""
        self.text = text
        self.move_cursor(self.document.end)

    def prepend(self, text: str) -> None:
        """Text that was not sent comes back, before whatever was written since."""
        self._at = None
        self.set_text(f"{text}\n{self.text}" if self.text else text)

    def begin_edit(self, line: str) -> None:
        """Show a line to be changed and sent, or left by `leave_edit`."""
        self._before_edit, self._at = self.text, None
        self.set_text(line)

    def leave_edit(self) -> bool:
        """Back to what was here before `begin_edit`; False where nothing is being changed."""
        before, self._before_edit = self._before_edit, None
        if before is not None:
            self.set_text(before)
        return before is not None

    def dismiss(self) -> bool:
        """Close the list of completions; False where none was open."""
        was_open = self._choices.display
        self._choices.hide()
        return was_open

    async def on_event(self, event: events.Event) -> None:
        """Letters that wait are in the text before anything else happens."""
        if not (isinstance(event, events.Key) and event.is_printable):
            self._put_typed()
        await super().on_event(event)

    def _wait(self, event: events.Key) -> bool:
        """Keep a letter until others that are here already have been taken; False where there are none.

        An edit takes half a millisecond, and a terminal without bracketed paste sends a text as single keys.
        """
        more = self.message_queue_size > 0 and len(self._typed) < _TOGETHER
        if not (more or self._typed) or event.character is None:
            return False
        if not self._typed:
            self.call_later(self._put_typed)  # where what comes next is no event
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
        self.call_after_refresh(self.scroll_cursor_visible)  # once there is room for all of it

    async def _on_key(self, event: events.Key) -> None:
        """Keys whose meaning depends on the text. As bindings they could overtake letters."""
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
            acts["left"] = partial(self.post_message, self.Turned(-1))
            acts["right"] = partial(self.post_message, self.Turned(1))
        if event.key in acts:
            event.stop()
            event.prevent_default()
            acts[event.key]()
        elif await self._run_own_binding(event.key):
            event.stop()
            event.prevent_default()

    async def _run_own_binding(self, key: str) -> bool:
        """Whether a key edits the text or moves in it, which is done.

        The app would do it once the key has come up to it, with the letters typed meanwhile in the text.
        """
        actions = [binding.action for binding in self._bindings.key_to_bindings.get(key, ())]
        return any([await self.app.run_action(action, self) for action in actions if "." not in action])

    def _send(self) -> None:
        self._offer()
        if (choice := self._choices.chosen()) is not None:
            self._take(choice)
            return
        text = self.text.lstrip("\n").rstrip()  # a space before a slash says that it is no command
        if not text:
            return
        if not self.recalled or self.recalled[-1] != text:
            self.recalled.append(text)
        self._at = self._before_edit = None
        self.clear()
        self.dismiss()
        self.post_message(self.Sent(text))

    def _empty(self) -> None:
        self.clear()
        self.dismiss()

    def _complete_line(self) -> None:
        """One completion is taken, of several what they share; then tab goes through them."""
        self._offer()
        if not self._choices.display:
            self._choices.offer(self._complete(self.text))
        if len(self._choices.offered) == 1:
            self._take(self._choices.offered[0].text)
        elif self._choices.common() not in ("", self.text):
            self.set_text(self._choices.common())
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
        """A command is completed as it is written."""
        event.stop()
        self._offer()

    def _offer(self) -> None:
        """What the line may become, where it is another than before: keys overtake the news of a change."""
        line = self.text
        if line == self._offered_for:
            return
        self._offered_for = line
        wanted = line.startswith("/") and not line.startswith("//") and "\n" not in line
        self._choices.offer([c for c in self._complete(line) if c.text != line] if wanted else ())

    def on_completion_list_taken(self, message: CompletionList.Taken) -> None:
        self._take(message.line)

    async def _on_paste(self, event: events.Paste) -> None:
        """Terminals send the end of a line as a carriage return, and Textual drops some kinds of it."""
        event.stop()
        event.prevent_default()
        self._put(_LINE_END.sub("\n", event.text))

    def _take(self, line: str) -> None:
        self.set_text(line)
        self._offered_for = line
        self._choices.hide()

    def _recall(self, by: int) -> None:
        """Go through what was sent; past the latest is what the user was writing."""
        if not self.recalled or (self._at is None and by > 0):
            return
        if self._at is None or self.text != self.recalled[self._at]:
            self._own = self.text  # what was recalled and then changed is the user's own
        at = len(self.recalled) if self._at is None else self._at
        at = max(at + by, 0)
        self._at = at if at < len(self.recalled) else None
        self.set_text(self._own if self._at is None else self.recalled[at])
        self.dismiss()
