"""The folder in which conversations are kept, one file each."""

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offspec.chat.conversation import Conversation, clean_title
from offspec.core.errors import SessionError
from offspec.core.file_lock import is_claimed
from offspec.core.private import data_root
from offspec_planners.json_fields import parse

_SHOWN = 5  # names that an error proposes
_FIRST_LINE = 1 << 20  # bytes of a file in which its first line must end
_END = b"\n]}\n"  # how `Conversation.to_text` ends


@dataclass(frozen=True, slots=True)
class Entry:
    """One conversation of the archive. turns: questions asked; updated: ISO 8601 in UTC."""

    file: Path
    id: str
    title: str
    model: str
    updated: str
    turns: int


Entries = list[Entry]


@dataclass(frozen=True, slots=True)
class Damaged:
    """What cannot be read in the archive. reason: one line, which names the file."""

    file: Path
    reason: str


class Archive:
    """Conversations by name. damaged: what the last `list` could not read, by name."""

    def __init__(self, folder: Path | None = None) -> None:
        """folder: by default `sessions` in the user's data folder; made when something is first saved."""
        self.folder = folder or data_root() / "sessions"
        self.damaged: tuple[Damaged, ...] = ()

    def file_for(self, conversation: Conversation) -> Path:
        """Where a conversation is kept here."""
        return self.folder / f"{conversation.id}.json"

    def is_open(self, file: Path) -> bool:
        """Whether a session, in whichever process, keeps its conversation in that file now."""
        return is_claimed(file)

    def list(self) -> Entries:
        """All conversations in which something was said, those that changed last first."""
        damaged: list[Damaged] = []
        try:
            files = [file for file in self.folder.iterdir() if _is_session(file)]
        except FileNotFoundError:  # nothing was saved yet
            files = []
        except OSError as error:
            files = []
            damaged.append(Damaged(self.folder, f"cannot read the folder {self.folder}: {error.strerror}"))
        found = []
        for file in sorted(files):
            try:
                found.append(_entry(file))
            except SessionError as error:
                damaged.append(Damaged(file, str(error)))
        self.damaged = tuple(damaged)
        entries = [entry for entry in found if entry.turns]
        return sorted(entries, key=lambda entry: (entry.updated, entry.id), reverse=True)

    def latest(self, model: str | None = None) -> Entry | None:
        """The conversation that changed last, of those with this model."""
        return next((entry for entry in self.list() if model in (None, entry.model)), None)

    def find(self, name: str) -> Path:
        """The file of that path, or of the conversation with that id, beginning of an id, or title.

        Raises SessionError where there is none or more than one, which proposes others, and where it cannot
        be read, which says why.
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
        unread = f"; {self.unread()}" if self.damaged else ""
        if not entries:
            raise SessionError(f"{none}{unread or f': none was saved in {self.folder} yet'}")
        raise SessionError(f"{none}; there are {_named(_near(wanted, entries))}{unread}")

    def unread(self) -> str:
        """What the last `list` could not read, and why, on one line."""
        reasons = [damaged.reason for damaged in self.damaged[:_SHOWN]]
        more = len(self.damaged) - len(reasons)
        return "; ".join([*reasons, f"and {more} more"] if more else reasons)


def _is_session(file: Path) -> bool:
    try:
        return file.suffix == ".json" and not file.name.startswith(".") and file.is_file()
    except OSError:  # it is there and may not be looked at: one that is damaged
        return True


def _entry(file: Path) -> Entry:
    """What a file says of itself in its first line, else all of it. Raises SessionError for a damaged one."""
    try:
        conversation, turns = _begin(file)
    except (OSError, ValueError, SessionError):
        conversation = Conversation.read(file)
        turns = conversation.turns
    return Entry(file, conversation.id, conversation.title, conversation.model, conversation.updated, turns)


def _begin(file: Path) -> tuple[Conversation, int]:
    """A conversation without its messages, and how many questions it has. Raises ValueError, SessionError."""
    with file.open("rb") as stream:
        first = stream.readline(_FIRST_LINE).decode()
        stream.seek(-min(file.stat().st_size, len(_END)), os.SEEK_END)
        whole = stream.read() == _END
    about = parse(first + "]}")
    if not (whole and isinstance(about, dict)):
        raise ValueError("this is laid out in another way, or cut short")
    return Conversation.from_json(about), about["turns"]


def _existing(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path if path.is_file() else None
    except (OSError, RuntimeError, ValueError):  # a name too long, an unknown ~user, a NUL
        return None


def _near(wanted: str, entries: Sequence[Entry]) -> list[Entry]:
    """Conversations whose title or id is something like what was wanted, else the latest ones."""
    close = difflib.get_close_matches(wanted, [entry.title.casefold() for entry in entries], _SHOWN, 0.5)
    near = [entry for entry in entries if entry.title.casefold() in close or wanted in entry.title.casefold()]
    return (near or list(entries))[:_SHOWN]


def _named(entries: Sequence[Entry]) -> str:
    shown = [f"{entry.id} ({entry.title})" for entry in entries[:_SHOWN]]
    return ", ".join(shown)
