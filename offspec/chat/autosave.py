"""A conversation's file, kept up to date while an answer comes."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from offspec.chat.conversation import Conversation
from offspec.chat.message import Message
from offspec.core.errors import OffspecError
from offspec.core.file_lock import Claim
from offspec.core.files import real_path

EVERY_S = 2.0  # an answer that is killed has lost no more than what came in this time

Snapshot = Callable[[], Conversation]
_Said = tuple[list[Message], int]


class Autosave:
    """Writes a conversation to a file, once it has one, which no other keeper may write meanwhile.

    snapshot: gives the conversation as it is at that moment. It is called while no other thread writes, so
    that no early snapshot overwrites a later one.
    """

    def __init__(self) -> None:
        self._file: Path | None = None
        self._claim: Claim | None = None
        self._lock = threading.Lock()
        self._failing = False
        self._trouble: str | None = None

    def move(self, file: Path | None, snapshot: Snapshot) -> None:
        """Write to this file from now on, or nowhere. It is claimed now if it is there, else later.

        What the file before should hold and does not, its disk being full, is written to it first. Raises
        SessionError or DiskFullError where that fails again or another has claimed the new file; nothing has
        changed then.
        """
        file = None if file is None else real_path(file)
        with self._lock:
            if file is not None and file == self._file:
                return
            claim = Claim(file) if file is not None and file.exists() else None
            try:
                if self._failing:
                    self._put(snapshot)
            except OffspecError:
                if claim is not None:
                    claim.release()
                raise
            self._let_go()
            self._file, self._claim = file, claim

    def close(self, snapshot: Snapshot) -> None:
        """As `move` to nowhere, which it is even where it raises."""
        try:
            self.move(None, snapshot)
        finally:
            with self._lock:
                self._let_go()

    def keeps(self, file: Path) -> bool:
        """Whether this is the file."""
        return self._file is not None and self._file == real_path(file)

    def save(self, snapshot: Snapshot) -> None:
        """Write what was said so far. Raises SessionError, DiskFullError."""
        with self._lock:
            self._put(snapshot)

    def write(self, snapshot: Snapshot) -> None:
        """As `save`, but trouble is told by `trouble`."""
        with self._lock:
            try:
                self._put(snapshot)
            except OffspecError as error:
                if not self._failing:
                    self._trouble = f"what is said is not being saved: {error}"
                self._failing = True

    def erase(self) -> None:
        """Take the file away again, in which nothing was said."""
        with self._lock, suppress(OSError):
            if self._claim is not None and self._file is not None:
                self._file.unlink(missing_ok=True)

    def trouble(self) -> str | None:
        """What the user should know, once, until writing has gone well again."""
        trouble, self._trouble = self._trouble, None
        return trouble

    @contextmanager
    def meanwhile(self, snapshot: Snapshot) -> Iterator[None]:
        """In a thread, every two seconds of the block, write what was said where that is more than before."""
        over, written = threading.Event(), _said(snapshot())  # now: the thread may begin when there is more
        thread = threading.Thread(
            target=self._watch, args=(snapshot, written, over), name="offspec keeper", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _watch(self, snapshot: Snapshot, written: _Said, over: threading.Event) -> None:
        while not over.wait(EVERY_S):
            said = _said(snapshot())
            if said != written:
                self.write(snapshot)
                written = said

    def _put(self, snapshot: Snapshot) -> None:
        if self._file is None:
            return
        if self._claim is None:
            self._claim = Claim(self._file)
        snapshot().write(self._file)
        self._failing, self._trouble = False, None

    def _let_go(self) -> None:
        if self._claim is not None:
            self._claim.release()
        self._file, self._claim, self._failing, self._trouble = None, None, False, None


def _said(conversation: Conversation) -> _Said:
    """The messages without their figures: the seconds of an answer pass though nothing new was said.

    A retry that says what the answer before said shows in the number of branches.
    """
    return [replace(message, figures=None) for message in conversation.messages], len(conversation.branches)
