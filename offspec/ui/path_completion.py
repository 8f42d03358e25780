"""Completion of paths."""

import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

MODELS = (".gguf", ".safetensors", ".pt", ".bin")
_MOST = 50


def complete_path(begun: str, endings: Sequence[str] = ("",)) -> Iterator[tuple[str, str]]:
    """Yield completions of a path, also in the current folder, each with its kind."""
    anywhere = begun.startswith(("/", "~", ".")) or "/" in begun
    for path, kind in complete_explicit_path(begun if anywhere else f"./{begun}", endings):
        yield path if anywhere else path.removeprefix("./"), kind


def complete_explicit_path(begun: str, endings: Sequence[str] = ("",)) -> Iterator[tuple[str, str]]:
    """Yield completions of a text that looks like a path, each with its kind.

    Args:
        begun: Text typed so far.
        endings: File name endings to offer; folders are always offered.
    """
    if not begun.startswith(("/", "~", ".")) and "/" not in begun:
        return
    shown, _, last = begun.rpartition("/")
    folder = Path(f"{shown}/" if shown or begun.startswith("/") else ".")
    try:
        found = sorted(os.scandir(folder.expanduser()), key=lambda entry: entry.name)
    except (OSError, RuntimeError, ValueError):  # no such folder, an unknown ~user
        return
    wanted = [entry for entry in found if entry.name.startswith(last) and not _hidden(entry.name, last)]
    fitting = (entry for entry in wanted if entry.name.endswith(tuple(endings)) or _is_folder(entry))
    for entry in islice(fitting, _MOST):
        name = f"{shown}/{entry.name}" if "/" in begun else entry.name
        yield (f"{name}/", "a folder") if _is_folder(entry) else (name, "a file")


def _hidden(name: str, begun: str) -> bool:
    return name.startswith(".") and not begun.startswith(".")


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    """Return whether an entry is a folder; False for a link whose target is not accessible."""
    try:
        return entry.is_dir()
    except OSError:
        return False
