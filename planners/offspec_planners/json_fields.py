"""JSON that a person may have edited: read key by key, and complained about by key, value and remedy.

fields = Fields(json.loads(text))
budget = fields.whole("budget", low=1)      # ValueError: budget is "many"; it should be a whole number …
fields.done()                               # ValueError where a key is left that nobody asked for
"""

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

_SHOWN = 40  # characters of a wrong value that a complaint quotes
_LINE = 150  # characters up to which `layout` keeps a list or an object on one line
_LARGEST = 2**63 - 1


class Fields:
    """One object of the file. `path` is where it lies, such as `costs.`; empty at the top."""

    def __init__(self, value: object, path: str = "") -> None:
        if not isinstance(value, dict):
            complain(path.rstrip(".") or "the file", value, "a JSON object")
        self._values: dict[str, Any] = value
        self._path = path
        self._asked = set[str]()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def take(self, key: str, should: str) -> Any:
        """The value of a key, of whatever type. Raises ValueError where it is missing."""
        self._asked.add(key)
        if key not in self._values:
            raise ValueError(f"{self._path}{key} is missing; it should be {should}")
        return self._values[key]

    def text(self, key: str) -> str:
        value = self.take(key, "a text")
        return value if isinstance(value, str) else self.wrong(key, "a text")

    def texts(self, key: str) -> tuple[str, ...]:
        should = "a list of texts"
        value = self.take(key, should)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.wrong(key, should)
        return tuple(value)

    def choice(self, key: str, among: Sequence[str]) -> str:
        should = "one of " + ", ".join(json.dumps(word) for word in among)
        value = self.take(key, should)
        return value if isinstance(value, str) and value in among else self.wrong(key, should)

    def whole(self, key: str, low: int = 0) -> int:
        """A whole number of at least `low`."""
        should = f"a whole number of {low} or more"
        value = self.take(key, should)
        return int(value) if _is_whole(value, low) else self.wrong(key, should)

    def whole_or_none(self, key: str, low: int = 0) -> int | None:
        should = f"a whole number of {low} or more, or null"
        value = self.take(key, should)
        if value is None:
            return None
        return int(value) if _is_whole(value, low) else self.wrong(key, should)

    def flag(self, key: str) -> bool:
        value = self.take(key, "true or false")
        if not isinstance(value, bool):
            self.wrong(key, "true or false")
        return value

    def number(self, key: str, *, above_zero: bool = False) -> float:
        """A finite number that is not negative."""
        should = f"a number {'above 0' if above_zero else 'of 0 or more'}"
        value = self.take(key, should)
        return float(value) if _is_number(value, above_zero) else self.wrong(key, should)

    def number_or_none(self, key: str) -> float | None:
        should = "a number of 0 or more, or null"
        value = self.take(key, should)
        if value is None:
            return None
        return float(value) if _is_number(value, False) else self.wrong(key, should)

    def points(self, key: str) -> tuple[tuple[int, float], ...]:
        """A curve: at least one pair of a whole number, ascending and above 0, and a number."""
        should = "a list of pairs [whole number, number], the first ones ascending"
        value = self.take(key, should)
        if not isinstance(value, list) or not value or not all(_is_point(pair) for pair in value):
            self.wrong(key, should)
        points = tuple((at, float(number)) for at, number in value)
        if any(left[0] >= right[0] for left, right in pairwise(points)):
            self.wrong(key, should)
        return points

    def array(self, key: str, should: str) -> NDArray[np.float64]:
        """Finite numbers in lists, as deep as they go; the caller looks at the shape."""
        value = self.take(key, should)
        try:
            found = np.array(value)
        except ValueError:  # lists of unequal lengths
            self.wrong(key, should)
        if not isinstance(value, list) or found.dtype.kind not in "iuf" or not np.isfinite(found).all():
            self.wrong(key, should)
        return found.astype(np.float64)

    def inner(self, key: str) -> "Fields":
        """The object under a key."""
        return Fields(self.take(key, "a JSON object"), f"{self._path}{key}.")

    def rows(self, key: str) -> list["Fields"]:
        """The objects in the list under a key."""
        should = "a list of JSON objects"
        value = self.take(key, should)
        if not isinstance(value, list):
            self.wrong(key, should)
        return [Fields(item, f"{self._path}{key}[{index}].") for index, item in enumerate(value)]

    def done(self) -> None:
        """Raises ValueError where the object holds a key that was not asked for."""
        unknown = sorted(self._values.keys() - self._asked)
        if unknown:
            known = ", ".join(sorted(self._asked))
            raise ValueError(f"{self._path}{unknown[0]} is not known here; known are {known}")

    def wrong(self, key: str, should: str) -> NoReturn:
        """Complain about the value of a key."""
        complain(f"{self._path}{key}", self._values[key], should)


def complain(where: str, value: object, should: str) -> NoReturn:
    """Raise the ValueError that says what stands somewhere, and what should."""
    shown = json.dumps(value, default=str)
    if len(shown) > _SHOWN:
        shown = shown[: _SHOWN - 3] + "..."
    raise ValueError(f"{where} is {shown}; it should be {should}")


def parse(text: str) -> object:
    """The value in a JSON text. Raises ValueError where it is none."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the file is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno} is not JSON: {error.msg}") from None


def layout(value: Any, indent: int = 0) -> str:
    """JSON to be read and edited: whatever fits on one line is on one line."""
    flat = json.dumps(value, ensure_ascii=False)
    if not value or not isinstance(value, dict | list | tuple) or len(flat) + indent <= _LINE:
        return flat
    inner = " " * (indent + 1)
    if isinstance(value, dict):
        items = [f"{inner}{json.dumps(key)}: {layout(item, indent + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(items) + "\n" + " " * indent + "}"
    items = [inner + layout(item, indent + 1) for item in value]
    return "[\n" + ",\n".join(items) + "\n" + " " * indent + "]"


def _is_whole(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= _LARGEST


def _is_number(value: object, above_zero: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or value > _LARGEST:
        return False
    return math.isfinite(value) and (value > 0 if above_zero else value >= 0)


def _is_point(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and _is_whole(pair[0], 1) and _is_number(pair[1], False)
