"""User-editable JSON: parsed into dataclasses, with errors that name the key, its value and the expected
value.

read({"budget": "many"}, Settings)   # ValueError: budget is "many"; it should be a whole number of 1 or more
"""

import json
import re
from collections.abc import Iterable
from dataclasses import is_dataclass
from itertools import pairwise
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
from msgspec import Meta

_SHOWN = 40  # maximum characters of an invalid value quoted in an error
_LINE = 150  # maximum characters of a list or object that `layout` keeps on one line
LARGEST = 2**63 - 1
_WORDS = {
    "BoolType": "true or false",
    "FloatType": "a number",
    "IntType": "a whole number",
    "ListType": "a list",
    "StrType": "a text",
    "VarTupleType": "a list",
}

Whole = Annotated[int, Meta(ge=0, le=LARGEST, description="a whole number of 0 or more")]
Count = Annotated[int, Meta(ge=1, le=LARGEST, description="a whole number of 1 or more")]
Number = Annotated[float, Meta(ge=0, le=LARGEST, description="a number of 0 or more")]
Share = Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1")]
Positive = Annotated[float, Meta(gt=0, le=LARGEST, description="a number above 0")]
Texts = Annotated[tuple[str, ...], Meta(description="a list of texts")]
Points = Annotated[
    tuple[tuple[Count, Number], ...],
    Meta(min_length=1, description="a list of pairs [whole number, number], the first ones ascending"),
]

T = TypeVar("T")


def one_of(*words: str) -> Meta:
    """Return metadata for `Annotated`: a string that is one of these words."""
    named = ", ".join(json.dumps(word) for word in words)
    return Meta(pattern=f"^({'|'.join(words)})\\Z", description=f"one of {named}")


def read(value: object, kind: type[T], path: str = "", *, partial: bool = False) -> T:
    """Parse the JSON object of a dataclass's fields. Raises ValueError: key, value, expected value.

    Args:
        value: JSON object; dataclass instances in it are kept.
        kind: dataclass whose fields declare what they accept: `Count`, `Number` and so on.
        path: path of the object in the file, such as `costs.`; empty at the top.
        partial: whether fields that have a default may be missing.
    """
    try:
        made = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        _explain(str(error), value, kind, path)
    except UnicodeEncodeError:  # an unpaired surrogate in a key or a value
        _refuse_halves(value, path)
        raise
    _compare_keys(value, made, path, partial)
    return made


def check_version(value: object, key: str, version: int, what: str) -> dict[str, Any]:
    """Return a JSON object without its version. Raises ValueError if the version is not supported.

    Args:
        value: JSON object.
        key: key of the version.
        version: latest supported version.
        what: description of the object, for the error if it has no version.
    """
    if not isinstance(value, dict) or key not in value:
        raise ValueError(f'this is not {what}: it has no "{key}"')
    found = value[key]
    if type(found) is not int or not 1 <= found <= LARGEST:
        complain(key, found, "a whole number of 1 or more")
    if found > version:
        raise ValueError(f"{key} is {found}; this version of offspec reads up to {version}: use a newer one")
    return {name: item for name, item in value.items() if name != key}


def require_ascending(points: Iterable[tuple[int, float]], where: str) -> None:
    """Raise ValueError unless the first numbers of a curve's points ascend."""
    if any(left[0] >= right[0] for left, right in pairwise(points)):
        complain(where, points, "a list of pairs [whole number, number], the first ones ascending")


def _explain(message: str, value: Any, kind: Any, path: str) -> NoReturn:
    """Convert an error of msgspec to ValueError, with the description of the innermost described type."""
    from msgspec import inspect

    what, _, place = message.partition(" - at `$")
    node, described, or_null, where = inspect.type_info(kind), "", "", path
    for name, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", place):
        if (described and index) or "..." in where:  # msgspec does not name the key in an object's values
            break
        if isinstance(node, inspect.DataclassType):
            node = next(field.type for field in node.fields if field.encode_name == name)
        else:
            assert isinstance(node, inspect.VarTupleType | inspect.ListType | inspect.DictType)
            node = node.value_type if isinstance(node, inspect.DictType) else node.item_type
        where = f"{where}{name}." if name else f"{where[:-1]}[{index}]."
        value = value if index == "..." else value[name or int(index)]
        described, or_null = "", ""
        if isinstance(node, inspect.UnionType):
            node, or_null = node.types[0], ", or null"
        if isinstance(node, inspect.Metadata):
            described, node = (node.extra_json_schema or {}).get("description", ""), node.type
    if missing := re.match("Object missing required field `(.*)`", what):
        raise ValueError(f"{where}{missing[1]} is missing")
    should = described or _WORDS.get(type(node).__name__, "a JSON object")
    complain(where.rstrip(".") or "the file", value, should + or_null)


def _refuse_halves(value: object, path: str) -> None:
    """Raise ValueError for the first string in a JSON value that contains an unpaired surrogate."""
    if isinstance(value, str) and _has_half(value):
        complain(path.rstrip("."), value, "valid Unicode text")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_halves(item, f"{path[:-1]}[{index}].")
    elif isinstance(value, dict):
        for key, item in value.items():
            if _has_half(key):
                raise ValueError(f"{path}{key} is not known here")
            _refuse_halves(item, f"{path}{key}.")


def _has_half(text: str) -> bool:
    return any("\ud800" <= sign <= "\udfff" for sign in text)


def _compare_keys(value: object, made: object, path: str, partial: bool) -> None:
    """Raise ValueError if an object lacks a field of the parsed dataclass, or has an unknown one."""
    if isinstance(value, dict) and is_dataclass(made):
        known = made.__dataclass_fields__
        for key in sorted(known.keys() ^ value.keys()):
            if key not in known:
                raise ValueError(f"{path}{key} is not known here; known are {', '.join(sorted(known))}")
            if not partial:
                raise ValueError(f"{path}{key} is missing")
        for key, item in value.items():
            _compare_keys(item, getattr(made, key), f"{path}{key}.", partial)
    elif isinstance(value, list) and isinstance(made, tuple) and made and is_dataclass(made[0]):
        for index, (item, part) in enumerate(zip(value, made, strict=True)):
            _compare_keys(item, part, f"{path[:-1]}[{index}].", partial)


def complain(where: str, value: object, should: str) -> NoReturn:
    """Raise a ValueError with the location, its value and the expected value."""
    shown = json.dumps(value, default=str)
    if len(shown) > _SHOWN:
        shown = shown[: _SHOWN - 3] + "..."
    raise ValueError(f"{where} is {shown}; it should be {should}")


def parse(text: str) -> object:
    """Parse JSON text. Raises ValueError if it is invalid."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the file is nested too deeply") from None
    except json.JSONDecodeError as error:
        why = re.sub("( starting)? at$", "", error.msg)  # Python appends the position
        raise ValueError(f"line {error.lineno} is not JSON: {why} (column {error.colno})") from None


def layout(value: Any, indent: int = 0) -> str:
    """Format JSON for reading and editing: whatever fits on one line is on one line."""
    flat = json.dumps(value, ensure_ascii=False)
    if not value or not isinstance(value, dict | list | tuple) or len(flat) + indent <= _LINE:
        return flat
    inner = " " * (indent + 1)
    if isinstance(value, dict):
        items = [f"{inner}{json.dumps(key)}: {layout(item, indent + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(items) + "\n" + " " * indent + "}"
    items = [inner + layout(item, indent + 1) for item in value]
    return "[\n" + ",\n".join(items) + "\n" + " " * indent + "]"
