"""A conversation's file, kept up to date while an answer comes."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from offspec.conversation import Conversation
from offspec.errors import OffspecError

EVERY_S = 2.0  # an answer that is killed has lost no more than what came in this time


class Keeper:
    """Writes a conversation to a file, once it has one. Trouble with the disk is told and never raised."""

    def __init__(self) -> None:
        self._file: Path | None = None
        self._lock = threading.Lock()
        self._failing = False
        self._trouble: str | None = None

    def move(self, file: Path | None) -> None:
        """Write to this file from now on, or nowhere."""
        with self._lock:
            self._file, self._failing, self._trouble = file, False, None

    def write(self, conversation: Conversation) -> None:
        """Write what was said so far."""
        with self._lock:
            if self._file is None:
                return
            try:
                conversation.write(self._file)
            except OffspecError as error:
                if not self._failing:
                    self._trouble = f"what is said is not being saved: {error}"
                self._failing = True
            else:
                self._failing = False

    def trouble(self) -> str | None:
        """What the user should know, once, until writing has gone well again."""
        trouble, self._trouble = self._trouble, None
        return trouble

    @contextmanager
    def meanwhile(self, snapshot: Callable[[], Conversation]) -> Iterator[None]:
        """In a thread, every two seconds of the block, write what `snapshot` gives where that is new."""
        over = threading.Event()
        thread = threading.Thread(
            target=self._watch, args=(snapshot, over), name="offspec keeper", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _watch(self, snapshot: Callable[[], Conversation], over: threading.Event) -> None:
        written = snapshot().messages
        while not over.wait(EVERY_S):
            conversation = snapshot()
            if conversation.messages != written:
                self.write(conversation)
                written = conversation.messages
