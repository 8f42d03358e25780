"""Automatic saving of a conversation to a file during answers."""

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

INTERVAL_S = 2.0  # a killed process loses at most this much of an answer

Snapshot = Callable[[], Conversation]
_Contents = tuple[list[Message], int]


class Autosave:
    """Writer of a conversation to its file, which no other session may write at the same time.

    The methods take a `snapshot`, which returns the current conversation. It is called while no other thread
    writes, so that an early snapshot never overwrites a later one.
    """

    def __init__(self) -> None:
        self._file: Path | None = None
        self._claim: Claim | None = None
        self._lock = threading.Lock()
        self._failing = False
        self._trouble: str | None = None

    def set_file(self, file: Path | None, snapshot: Snapshot) -> None:
        """Set the file to write to, or None. An existing file is locked now, a new one at the first write.

        If the last write to the previous file failed, for example because of a full disk, it is repeated
        first. Raises SessionError or DiskFullError, without any change, if that fails again or if another
        session has locked the new file.
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
            self._release()
            self._file, self._claim = file, claim

    def close(self, snapshot: Snapshot) -> None:
        """Stop saving, like `set_file(None)`, but release the file even if the last write fails."""
        try:
            self.set_file(None, snapshot)
        finally:
            with self._lock:
                self._release()

    def writes_to(self, file: Path) -> bool:
        """Return whether this is the file."""
        return self._file is not None and self._file == real_path(file)

    def save(self, snapshot: Snapshot) -> None:
        """Write the conversation. Raises SessionError, DiskFullError."""
        with self._lock:
            self._put(snapshot)

    def write(self, snapshot: Snapshot) -> None:
        """Write the conversation; an error is returned later by `take_warning`."""
        with self._lock:
            try:
                self._put(snapshot)
            except OffspecError as error:
                if not self._failing:
                    self._trouble = f"the conversation is not being saved: {error}"
                self._failing = True

    def delete_file(self) -> None:
        """Delete the file of an empty conversation."""
        with self._lock, suppress(OSError):
            if self._claim is not None and self._file is not None:
                self._file.unlink(missing_ok=True)

    def take_warning(self) -> str | None:
        """Return a warning about a failed write, once until a write succeeds again."""
        trouble, self._trouble = self._trouble, None
        return trouble

    @contextmanager
    def write_periodically(self, snapshot: Snapshot) -> Iterator[None]:
        """While the block runs, write the conversation every two seconds if it has changed, in a thread."""
        stop = threading.Event()
        written = _contents(snapshot())  # before the thread starts, which may be late
        thread = threading.Thread(
            target=self._watch, args=(snapshot, written, stop), name="offspec keeper", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _watch(self, snapshot: Snapshot, written: _Contents, stop: threading.Event) -> None:
        while not stop.wait(INTERVAL_S):
            contents = _contents(snapshot())
            if contents != written:
                self.write(snapshot)
                written = contents

    def _put(self, snapshot: Snapshot) -> None:
        if self._file is None:
            return
        if self._claim is None:
            self._claim = Claim(self._file)
        snapshot().write(self._file)
        self._failing, self._trouble = False, None

    def _release(self) -> None:
        if self._claim is not None:
            self._claim.release()
        self._file, self._claim, self._failing, self._trouble = None, None, False, None


def _contents(conversation: Conversation) -> _Contents:
    """Return the messages without figures, and the number of branches, to detect changes.

    The figures are excluded because seconds change even if no text is added. The number of branches reveals a
    retry with the same text as the earlier answer.
    """
    return [replace(message, figures=None) for message in conversation.messages], len(conversation.branches)
