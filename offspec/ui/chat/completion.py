"""Completion of slash commands."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from offspec.chat.archive import SessionArchive, SessionEntry
from offspec.checkpoint.open import local_names
from offspec.core.config import AUTO, NONE, SOURCES
from offspec.ui.chat.commands import COMMANDS
from offspec.ui.chat.settings import MEANINGS, choices_of
from offspec.ui.path_completion import MODELS, complete_explicit_path, complete_path
from offspec_planners.units import format_count

_Saved = Callable[[], list[SessionEntry]]
_Offer = Callable[[str, _Saved], Iterator[tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole line that replaces the typed one. help: meaning of the completion."""

    text: str
    help: str


class Completer:
    """Completer that lists saved conversations only once per input line."""

    def __init__(self, archive: SessionArchive) -> None:
        self._archive = archive
        self._entries: list[SessionEntry] | None = None

    def complete(self, line: str) -> list[Completion]:
        """Return the completions of a line, best first; none if it is not a command."""
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
        """Drop the cached list of conversations."""
        self._entries = None

    def _saved(self) -> list[SessionEntry]:
        if self._entries is None:
            self._entries = self._archive.list()
        return self._entries


def _commands(begun: str, saved: _Saved) -> Iterator[tuple[str, str]]:
    for command in COMMANDS.values():
        if command.name.startswith(begun.removeprefix("/").lower()):
            yield command.name, command.help


def _settings(begun: str, saved: _Saved) -> Iterator[tuple[str, str]]:
    before, _, last = begun.rpartition(" ")
    wanted, equals, value = last.lower().partition("=")
    for name, meaning in MEANINGS.items():
        if equals and name == wanted:
            for choice, means in choices_of(name):
                if choice.startswith(value):
                    yield f"{before} {name}={choice}".lstrip(), means
        elif not equals and name.startswith(wanted):
            yield f"{before} {name}=".lstrip(), meaning


def _sessions(begun: str, saved: _Saved) -> Iterator[tuple[str, str]]:
    for entry in saved():
        if begun.lower() in entry.title.lower() or entry.id.startswith(begun):
            yield entry.title or entry.id, f"{format_count(entry.turns, 'question')}, {entry.model}"
    yield from complete_explicit_path(begun, (".json",))


def complete_drafts(begun: str) -> Iterator[tuple[str, str]]:
    """Yield completions of a comma-separated list of draft sources, with their meanings."""
    before, comma, last = begun.rpartition(",")
    for name, meaning in (*SOURCES.items(), *local_names()):
        if name.lower().startswith(last.lower()) and not (comma and name in (AUTO, NONE)):
            yield f"{before}{comma}{name}", meaning
    for name, meaning in complete_explicit_path(last, MODELS):
        yield f"{before}{comma}{name}", meaning


def _words(*choices: tuple[str, str]) -> _Offer:
    def offered(begun: str, saved: _Saved) -> Iterator[tuple[str, str]]:
        return (choice for choice in choices if choice[0].startswith(begun.lower()))

    return offered


_ARGUMENTS: Mapping[str, _Offer] = {
    "help": _commands,
    "set": _settings,
    "seed": _words(("random", "a new seed for every answer")),
    "system": _words(("none", "no system message")),
    "save": lambda begun, saved: complete_explicit_path(begun, (".json",)),
    # Also files of the current folder: the argument can only be a file.
    "attach": lambda begun, saved: complete_path(begun),
    "export": lambda begun, saved: complete_explicit_path(begun, (".md",)),
    "load": _sessions,
    "draft": lambda begun, saved: complete_drafts(begun),
    "copy": _words(("code", "the last block of code")),
    "sources": _words(("on", "highlight them"), ("off", "plain text")),
}
