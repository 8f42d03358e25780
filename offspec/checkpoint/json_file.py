"""Reading and writing the JSON files of a model; input is validated."""

import json
from pathlib import Path
from typing import Any

from offspec.checkpoint.ranges import one_line
from offspec.core.errors import HeaderError
from offspec.core.files import open_to_read, write_atomic

_MAX_JSON = 64 * 2**20


def read_json(path: Path, most: int = _MAX_JSON) -> dict[str, Any]:
    """Read a JSON object from a file of the model.

    Raises CheckpointError if the file cannot be read, HeaderError if it is damaged or exceeds `most` bytes.
    """
    with open_to_read(path) as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise HeaderError(f"{path} is implausibly large; download it again")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"{path} is not valid JSON ({_fault(error)}); download it again") from error
    if not isinstance(value, dict):
        raise HeaderError(f"{path} must hold a JSON object; download it again")
    return value


def _fault(error: ValueError | RecursionError) -> str:
    """Return the position or the kind of a fault in JSON."""
    match error:
        case json.JSONDecodeError():
            return f"line {error.lineno}, column {error.colno}" if error.doc.strip() else "the file is empty"
        case UnicodeDecodeError():
            return f"byte {error.start} is not UTF-8"
        case RecursionError():
            return "nested too deeply"
        case _:
            return one_line(error)


def write_json(path: Path, value: dict[str, Any], *, sort_keys: bool = False) -> None:
    """Write an object as indented JSON. Raises DiskFullError."""
    write_atomic(path, (json.dumps(value, indent=2, sort_keys=sort_keys) + "\n").encode())
