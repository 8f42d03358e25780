"""Folder of saved conversations, with one file each."""

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offspec.chat.conversation import Conversation, clean_title
from offspec.core.errors import SessionError
from offspec.core.file_lock import is_claimed
from offspec.core.private_folders import data_root
from offspec_planners.json_fields import parse

_SHOWN = 5  # maximum number of names that an error suggests
_FIRST_LINE = 1 << 20  # maximum bytes of a file's first line
_END = b"\n]}\n"  # end of `Conversation.to_text`


@dataclass(frozen=True, slots=True)
class SessionEntry:
    """Conversation in the archive. turns: number of questions. updated: ISO 8601 in UTC."""

    file: Path
    id: str
    title: str
    model: str
    updated: str
    turns: int


SessionEntries = list[SessionEntry]


@dataclass(frozen=True, slots=True)
class UnreadableSession:
    """Unreadable file of the archive. reason: one line that names the file."""

    file: Path
    reason: str


class SessionArchive:
    """Saved conversations. damaged: files that the last `list` could not read, by name."""

    def __init__(self, folder: Path | None = None) -> None:
        """folder: default `sessions` in the user's data folder; created at the first save."""
        self.folder = folder or data_root() / "sessions"
        self.damaged: tuple[UnreadableSession, ...] = ()

    def file_for(self, conversation: Conversation) -> Path:
        """Return the file of a conversation in this archive."""
        return self.folder / f"{conversation.id}.json"

    def is_in_use(self, file: Path) -> bool:
        """Return whether a session in any process is using that file."""
        return is_claimed(file)

    def list(self) -> SessionEntries:
        """Return all conversations that are not empty, the most recently changed first."""
        damaged: list[UnreadableSession] = []
        try:
            files = [file for file in self.folder.iterdir() if _is_session(file)]
        except FileNotFoundError:  # nothing was saved yet
            files = []
        except OSError as error:
            files = []
            damaged.append(
                UnreadableSession(self.folder, f"cannot read the folder {self.folder}: {error.strerror}")
            )
        found = []
        for file in sorted(files):
            try:
                found.append(_entry(file))
            except SessionError as error:
                damaged.append(UnreadableSession(file, str(error)))
        self.damaged = tuple(damaged)
        entries = [entry for entry in found if entry.turns]
        return sorted(entries, key=lambda entry: (entry.updated, entry.id), reverse=True)

    def latest(self, model: str | None = None) -> SessionEntry | None:
        """Return the most recently changed conversation with this model, or with any model for None."""
        return next((entry for entry in self.list() if model in (None, entry.model)), None)

    def find(self, name: str) -> Path:
        """Return the file with a path, or of the conversation with an id, id prefix, or title.

        Raises SessionError, with suggestions if there is no match or more than one, and with the reason if
        the file cannot be read.
        """
        entries, wanted = self.list(), name.strip().casefold()
        matches = [entry for entry in entries if wanted == entry.id.casefold()]
        matches = matches or [entry for entry in entries if wanted == entry.title.casefold()]
        if not matches and (path := _existing(name.strip())):
            return path
        if wanted and not matches:
            matches = [entry for entry in entries if entry.id.casefold().startswith(wanted)]
        if len(matches) == 1:
            return matches[0].file
        if matches:
            raise SessionError(
                f"several sessions are called {clean_title(name)!r}: {_named(matches)}; give an id"
            )
        for damaged in self.damaged:
            if wanted and damaged.file.stem.casefold().startswith(wanted):
                raise SessionError(damaged.reason)
        none = f"there is no session {clean_title(name)!r}"
        unread = f"; {self.unreadable_summary()}" if self.damaged else ""
        if not entries:
            raise SessionError(f"{none}{unread or f': none was saved in {self.folder} yet'}")
        raise SessionError(f"{none}; there are {_named(_near(wanted, entries))}{unread}")

    def unreadable_summary(self) -> str:
        """Return on one line the files that the last `list` could not read, with reasons."""
        reasons = [damaged.reason for damaged in self.damaged[:_SHOWN]]
        more = len(self.damaged) - len(reasons)
        return "; ".join([*reasons, f"and {more} more"] if more else reasons)


def _is_session(file: Path) -> bool:
    try:
        return file.suffix == ".json" and not file.name.startswith(".") and file.is_file()
    except OSError:  # it exists but is not accessible: treat it as damaged
        return True


def _entry(file: Path) -> SessionEntry:
    """Read a file's entry from its first line, or else from all of it. Raises SessionError if damaged."""
    try:
        conversation, turns = _begin(file)
    except (OSError, ValueError, SessionError):
        conversation = Conversation.read(file)
        turns = conversation.turns
    return SessionEntry(
        file, conversation.id, conversation.title, conversation.model, conversation.updated, turns
    )


def _begin(file: Path) -> tuple[Conversation, int]:
    """Read a conversation without messages, and its number of questions. Raises ValueError, SessionError."""
    with file.open("rb") as stream:
        first = stream.readline(_FIRST_LINE).decode()
        stream.seek(-min(file.stat().st_size, len(_END)), os.SEEK_END)
        whole = stream.read() == _END
    about = parse(first + "]}")
    if not (whole and isinstance(about, dict)):
        raise ValueError("different layout, or truncated")
    return Conversation.from_json(about), about["turns"]


def _existing(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path if path.is_file() else None
    except (OSError, RuntimeError, ValueError):  # too long a name, an unknown ~user, a NUL
        return None


def _near(wanted: str, entries: Sequence[SessionEntry]) -> list[SessionEntry]:
    """Return conversations whose title or id is similar to `wanted`, or else the latest ones."""
    close = difflib.get_close_matches(wanted, [entry.title.casefold() for entry in entries], _SHOWN, 0.5)
    near = [entry for entry in entries if entry.title.casefold() in close or wanted in entry.title.casefold()]
    return (near or list(entries))[:_SHOWN]


def _named(entries: Sequence[SessionEntry]) -> str:
    shown = [f"{entry.id} ({entry.title})" for entry in entries[:_SHOWN]]
    return ", ".join(shown)
