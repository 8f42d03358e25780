"""What a command that is being typed may become."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from offspec.chat.archive import Archive, Entry
from offspec.core.config import AUTO, NONE, SOURCES
from offspec.ui.chat.commands import COMMANDS
from offspec.ui.chat.settings import MEANINGS
from offspec_planners.units import format_count

_MOST_FILES = 50

_Saved = Callable[[], list[Entry]]
_Offer = Callable[[str, _Saved], Iterator[tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole line to take the place of the one that was begun. help: what it would mean."""

    text: str
    help: str


class Completer:
    """Looks for conversations once while a line is written, however many keys that takes."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._entries: list[Entry] | None = None

    def complete(self, line: str) -> list[Completion]:
        """Every line that this one may become, best first; none where it is no command."""
        if not line.startswith("/") or line.startswith("//") or "\n" in line:
            return []
        name, space, argument = line[1:].partition(" ")
        if not space:
            self.forget()
            return [
                Completion(f"/{command.name}{' ' if command.takes_argument else ''}", command.help)
                for command in COMMANDS.values()
                if command.name.startswith(name.lower())
            ]
        if name not in _ARGUMENTS:
            return []
        offered = _ARGUMENTS[name](argument.lstrip(), self._saved)
        return [Completion(f"/{name} {text}", meaning) for text, meaning in offered]

    def forget(self) -> None:
        """Look for conversations again the next time."""
        self._entries = None

    def _saved(self) -> list[Entry]:
        if self._entries is None:
            self._entries = self._archive.list()
        return self._entries


def _commands(begun: str, saved: _Saved) -> Iterator[tuple[str, str]]:
    for command in COMMANDS.values():
        if command.name.startswith(begun.removeprefix("/").lower()):
            yield command.name, command.help


def _settings(begun: str, saved: _Saved) -> Iterator[tuple[str, str]]:
    before, _, last = begun.rpartition(" ")
    for name, meaning in MEANINGS.items():
        if name.startswith(last.lower()):
            yield f"{before} {name}=".lstrip(), meaning


def _sessions(begun: str, saved: _Saved) -> Iterator[tuple[str, str]]:
    for entry in saved():
        if begun.lower() in entry.title.lower() or entry.id.startswith(begun):
            yield entry.title or entry.id, f"{format_count(entry.turns, 'question')}, {entry.model}"
    yield from _files(begun, (".json",))


def _copies(begun: str, saved: _Saved) -> Iterator[tuple[str, str]]:
    yield from _files(begun, (".json",))


def _attachable(begun: str, saved: _Saved) -> Iterator[tuple[str, str]]:
    """Files of the present folder too: nothing else could be meant."""
    for name, meaning in _files(begun if "/" in begun or begun.startswith("~") else f"./{begun}", ("",)):
        yield name.removeprefix("./") if not begun.startswith(".") else name, meaning


def _drafts(begun: str, saved: _Saved) -> Iterator[tuple[str, str]]:
    before, comma, last = begun.rpartition(",")
    for name, meaning in SOURCES.items():
        if name.startswith(last.lower()) and not (comma and name in (AUTO, NONE)):
            yield f"{before}{comma}{name}", meaning
    for name, meaning in _files(last, (".gguf", ".safetensors", ".pt", ".bin")):
        yield f"{before}{comma}{name}", meaning


def _words(*choices: tuple[str, str]) -> _Offer:
    def offered(begun: str, saved: _Saved) -> Iterator[tuple[str, str]]:
        return (choice for choice in choices if choice[0].startswith(begun.lower()))

    return offered


def _files(begun: str, endings: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Files and folders that go on from what was begun, once it looks like a path."""
    if not begun.startswith(("/", "~", ".")) and "/" not in begun:
        return
    shown, _, last = begun.rpartition("/")
    folder = Path(f"{shown}/" if shown or begun.startswith("/") else ".")
    try:
        found = sorted(os.scandir(folder.expanduser()), key=lambda entry: entry.name)
    except (OSError, RuntimeError, ValueError):  # no such folder, an unknown ~user
        return
    wanted = [entry for entry in found if entry.name.startswith(last) and not _hidden(entry.name, last)]
    fitting = (entry for entry in wanted if entry.name.endswith(endings) or _is_folder(entry))
    for entry in islice(fitting, _MOST_FILES):
        name = f"{shown}/{entry.name}" if "/" in begun else entry.name
        yield (f"{name}/", "a folder") if _is_folder(entry) else (name, "a file")


def _hidden(name: str, begun: str) -> bool:
    return name.startswith(".") and not begun.startswith(".")


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    """Also where it is a link that goes nowhere one may look."""
    try:
        return entry.is_dir()
    except OSError:
        return False


_ARGUMENTS: Mapping[str, _Offer] = {
    "help": _commands,
    "set": _settings,
    "seed": _words(("random", "a new seed for every answer")),
    "system": _words(("none", "no system message")),
    "save": _copies,
    "attach": _attachable,
    "export": lambda begun, saved: _files(begun, (".md",)),
    "load": _sessions,
    "draft": _drafts,
    "copy": _words(("code", "the last block of code")),
    "sources": _words(("on", "mark them"), ("off", "plain text")),
}
