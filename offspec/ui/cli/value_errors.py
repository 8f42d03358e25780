"""Usage errors about values, in our words instead of pydantic's."""

from collections.abc import Mapping

import typer

# What a value must be, by the beginning of the kind of pydantic's error.
_WANTED: Mapping[str, str] = {
    "less_than": "at most {le}",
    "greater_than": "{ge} or above",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
}


def reworded(error: typer.BadParameter) -> str:
    """Return the message, in our words if Typer took it from pydantic."""
    details = getattr(error.__cause__, "errors", None)
    if details is None:
        return error.message
    first = details()[0]
    value, limits = first["input"], first.get("ctx", {})
    if first["type"] == "value_error":  # a choice, named by Typer itself
        return str(limits["error"])
    wanted = next(
        (text.format(**limits) for kind, text in _WANTED.items() if first["type"].startswith(kind)), ""
    )
    return f"it must be {wanted}, not {value}" if wanted else f"invalid value {value!r}"
