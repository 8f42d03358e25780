"""Conversion of caller-supplied values to the types of their fields."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from numbers import Real
from operator import index
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from offspec.core.errors import RequestError

_SHOWN = 60  # maximum length of a quoted value in an error
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_FEWEST_BYTES = 10**6  # smaller numbers without a unit were probably not meant in bytes


def read_fields(record: Any) -> None:
    """Convert every field of a dataclass to its type. Raises RequestError that names the field."""
    for field in fields(record):
        value = read_value(field.name, getattr(record, field.name), field.type)
        object.__setattr__(record, field.name, value)


def read_value(name: str, value: Any, kind: Any, wanted: str = "") -> Any:
    """Convert a value to a field's type: numpy numbers to Python's, lists to tuples, paths to strings.

    Args:
        name: Name of the field, for the error.
        value: Value from the caller.
        kind: Type of the field. Values of types that are not in `_READERS` are returned unchanged.
        wanted: Description of valid values, for the error; by default that of the type.

    Raises:
        RequestError: Wrong type.
    """
    options = get_args(kind)
    if NoneType in options:
        if value is None:
            return None
        kind = next(option for option in options if option is not NoneType)
    if kind not in _READERS:
        return value
    what, read = _READERS[kind]
    try:
        return read(value)
    except (TypeError, ValueError, OverflowError):
        raise RequestError(f"{name} must be {wanted or what}, not {short_repr(value)}", field=name) from None


def short_repr(value: object) -> str:
    """Return a value's repr for an error: on one line, and truncated."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def is_unicode(text: str) -> bool:
    """Return whether a text can be encoded in UTF-8; one with an unpaired surrogate cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _whole(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return index(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError
    return float(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str | Path):
        raise TypeError
    return str(value)


def _each(read: Callable[[Any], Any], *alone: type) -> Callable[[Any], tuple[Any, ...]]:
    """Return a reader of lists: None becomes an empty one, a value of a type in `alone` a one-item list."""

    def several(value: Any) -> tuple[Any, ...]:
        if value is None:
            return ()
        if isinstance(value, alone):
            return (read(value),)
        if isinstance(value, str | bytes | bytearray | Mapping) or not isinstance(value, Iterable):
            raise TypeError
        return tuple(map(read, value))

    return several


def _pair(value: Any) -> tuple[int, float]:
    token, number = value
    return int(token) if isinstance(token, str) else _whole(token), _number(number)


def _pairs(value: Any) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(_each(_pair)(value.items() if isinstance(value, Mapping) else value)))


_READERS: Mapping[Any, tuple[str, Callable[[Any], Any]]] = {
    int: ("a whole number", _whole),
    float: ("a number", _number),
    bool: ("True or False", _flag),
    str: ("a string", _text),
    tuple[str, ...]: ("a string or a list of strings", _each(_text, str, Path)),
    tuple[int, ...]: ("a list of token ids", _each(_whole)),
    tuple[Path, ...]: ("a path or a list of paths", _each(Path, str, Path)),
    tuple[tuple[int, float], ...]: ("a mapping from token ids to numbers, or such pairs", _pairs),
}


def parse_bytes(text: str | int, name: str = "a size", least: int = 1) -> int:
    """Parse a number of bytes, `least` or more, from `"1.5GB"`, `"800MiB"`, `"12G"` or a plain number.

    Raises RequestError, also for a small number in a text without a unit, which hardly means bytes.
    """
    wanted = "above 0" if least else "0 or above"
    if not isinstance(text, str):
        size: int = read_value(name, text, int, "a size such as 1.5GB, or a whole number of bytes")
        if size < least:
            raise RequestError(f"a size must be {wanted}, not {size}")
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if not match or (match[3] and not match[2]):
        raise RequestError(f"cannot read {text!r} as a size; write it like 1.5GB or 800MiB")
    units = _BINARY if match[3] else _UNITS
    size = int(float(match[1]) * units[match[2].upper()])
    if 0 < float(match[1]) < _FEWEST_BYTES and text.strip()[-1].isdigit():
        raise _without_unit(match[1])
    if size < least:
        raise RequestError(f"a size must be {wanted}, not {text!r}")
    return size


def _without_unit(number: str) -> RequestError:
    """Return the error for a number without a unit that is too small to mean bytes."""
    meant = f"{number}GB" if float(number) < 1024 else f"{number}MB"
    unit = "byte" if number == "1" else "bytes"
    return RequestError(f"a size of {number} means {number} {unit}; add a unit: {meant}")
