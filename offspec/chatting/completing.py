"""What a command that is being typed may become."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from offspec.archive import Archive
from offspec.chatting.commands import COMMANDS
from offspec.chatting.settings import MEANINGS

_MOST_FILES = 50


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole line to take the place of the one that was begun. help: what it would mean."""

    text: str
    help: str


def complete(line: str, archive: Archive) -> list[Completion]:
    """Every line that this one may become, best first; none where it is no command."""
    if not line.startswith("/") or line.startswith("//") or "\n" in line:
        return []
    name, space, argument = line[1:].partition(" ")
    if not space:
        return [
            Completion(f"/{command.name}{' ' if command.takes_argument else ''}", command.help)
            for command in COMMANDS.values()
            if command.name.startswith(name.lower())
        ]
    if name not in _ARGUMENTS:
        return []
    return [
        Completion(f"/{name} {text}", meaning)
        for text, meaning in _ARGUMENTS[name](argument.lstrip(), archive)
    ]


def _commands(begun: str, archive: Archive) -> Iterator[tuple[str, str]]:
    for command in COMMANDS.values():
        if command.name.startswith(begun.removeprefix("/").lower()):
            yield command.name, command.help


def _settings(begun: str, archive: Archive) -> Iterator[tuple[str, str]]:
    before, _, last = begun.rpartition(" ")
    for name, meaning in MEANINGS.items():
        if name.startswith(last.lower()):
            yield f"{before} {name}=".lstrip(), meaning


def _sessions(begun: str, archive: Archive) -> Iterator[tuple[str, str]]:
    for entry in archive.list():
        if begun.lower() in entry.title.lower() or entry.id.startswith(begun):
            yield entry.title or entry.id, f"{entry.turns} questions, {entry.model}"
    yield from _files(begun, (".json",))


def _saved(begun: str, archive: Archive) -> Iterator[tuple[str, str]]:
    yield from _files(begun, (".json",))


def _drafts(begun: str, archive: Archive) -> Iterator[tuple[str, str]]:
    for name, meaning in (("auto", "a 4-bit copy of the target"), ("none", "one token a pass")):
        if name.startswith(begun.lower()):
            yield name, meaning
    yield from _files(begun, (".gguf",))


def _words(*choices: tuple[str, str]) -> Callable[[str, Archive], Iterator[tuple[str, str]]]:
    def offered(begun: str, archive: Archive) -> Iterator[tuple[str, str]]:
        return (choice for choice in choices if choice[0].startswith(begun.lower()))

    return offered


def _files(begun: str, endings: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Files and folders that go on from what was begun, once it looks like a path."""
    if not begun.startswith(("/", "~", ".")) and "/" not in begun:
        return
    shown, _, last = begun.rpartition("/")
    folder = Path(f"{shown}/" if shown or begun.startswith("/") else ".")
    try:
        found = sorted(folder.expanduser().iterdir())
    except (OSError, RuntimeError, ValueError):  # no such folder, an unknown ~user
        return
    wanted = [path for path in found if path.name.startswith(last) and not _hidden(path, last)]
    for path in [path for path in wanted if path.is_dir() or path.suffix in endings][:_MOST_FILES]:
        name = f"{shown}/{path.name}" if "/" in begun else path.name
        yield (f"{name}/", "a folder") if path.is_dir() else (name, "a file")


def _hidden(path: Path, begun: str) -> bool:
    return path.name.startswith(".") and not begun.startswith(".")


_ARGUMENTS: Mapping[str, Callable[[str, Archive], Iterator[tuple[str, str]]]] = {
    "help": _commands,
    "set": _settings,
    "seed": _words(("random", "a fresh seed for every answer")),
    "system": _words(("none", "no system message")),
    "save": _saved,
    "load": _sessions,
    "draft": _drafts,
    "sources": _words(("on", "mark them"), ("off", "plain text")),
}
