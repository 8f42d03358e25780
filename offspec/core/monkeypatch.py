"""Temporary replacement of attributes of other packages; `offspec.model.patches` lists all replacements."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

_ABSENT = object()
_LOCK = Lock()


@dataclass(frozen=True, slots=True)
class Replacement:
    """Attribute to replace.

    Args:
        owner: Module or class.
        name: Attribute of it.
        make: Returns the replacement for the original. All threads of the process see the replacement, so
            outside of offspec's own calls it must behave like the original.
    """

    owner: Any
    name: str
    make: Callable[[Any], Any]


@dataclass(slots=True)
class _Installed:
    own: object  # attribute that the owner itself had, _ABSENT if it was inherited
    blocks: int = 0


_INSTALLED: dict[tuple[Any, str], _Installed] = {}


@contextmanager
def monkeypatched(replacements: Iterable[Replacement]) -> Iterator[None]:
    """Replace attributes while the block runs.

    Blocks of several threads may overlap: the first one installs a replacement, the last one restores the
    original.
    """
    entered = list[tuple[Any, str]]()
    try:
        with _LOCK:
            for replacement in replacements:
                _install(replacement)
                entered.append((replacement.owner, replacement.name))
        yield
    finally:
        with _LOCK:
            for owner, name in entered:
                _uninstall(owner, name)


def _install(replacement: Replacement) -> None:
    owner, name = replacement.owner, replacement.name
    installed = _INSTALLED.get((owner, name))
    if installed is None:
        made = replacement.make(getattr(owner, name))
        installed = _INSTALLED[owner, name] = _Installed(vars(owner).get(name, _ABSENT))
        setattr(owner, name, made)
    installed.blocks += 1


def _uninstall(owner: Any, name: str) -> None:
    installed = _INSTALLED[owner, name]
    installed.blocks -= 1
    if installed.blocks:
        return
    del _INSTALLED[owner, name]
    if installed.own is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, installed.own)
