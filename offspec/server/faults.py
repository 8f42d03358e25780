"""What can go wrong with a request, in no API's own shape."""

import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

from offspec.core.errors import CapacityError, ClosedError, ContextLengthError, OffspecError, RequestError

Kind = Literal[
    "invalid_request",
    "authentication",
    "permission",
    "not_found",
    "timeout",
    "too_large",
    "rate_limit",
    "unavailable",
    "server",
]

_STATUS: dict[Kind, int] = {
    "invalid_request": 400,
    "authentication": 401,
    "permission": 403,
    "not_found": 404,
    "timeout": 408,
    "too_large": 413,
    "rate_limit": 429,
    "unavailable": 503,
    "server": 500,
}
CLIENT_GONE = 499  # as nginx logs it; no client sees it

_PLACE = re.compile(r" - at (`key` in )?`\$(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")
_NAMED = re.compile(r"(?P<name>[a-z_]+) (must be|has the token) ")  # as `SamplingParams` and rules word it
_T = TypeVar("_T")


class Fault(Exception):
    """Why a request gets no answer.

    Args:
        kind: Which kind of fault, with an HTTP status of its own.
        message: One line for the user.
        field: The part of the body that is wrong, such as "messages[0].content"; None where no part is.
        code: A word for programs, such as "model_not_found".
        retry_after: Seconds after which to try again; None where that is no use.
    """

    def __init__(
        self,
        kind: Kind,
        message: str,
        *,
        field: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.kind, self.message, self.field, self.code = kind, message, field, code
        self.retry_after = retry_after

    @property
    def status(self) -> int:
        """The HTTP status."""
        return _STATUS[self.kind]


def internal() -> Fault:
    """The fault that a bug is for a client."""
    return Fault("server", "an internal error, which the server's log describes")


def unsupported(field: str, why: str = "it is not supported here; leave it out") -> Fault:
    """The fault of a request for something that cannot be done."""
    return Fault("invalid_request", f"{field}: {why}", field=field, code="unsupported_parameter")


def refuse(given: Mapping[str, Any], harmless: Mapping[str, Any]) -> None:
    """Raises Fault for a field that was given another value than None and the harmless one."""
    for name, value in given.items():
        if value is not None and value != harmless.get(name):
            raise unsupported(name)


def parse(body: bytes, wanted: type[_T]) -> _T:
    """A body as what its type says. Raises Fault, with the name of the field that is wrong."""
    try:
        return msgspec.json.decode(body, type=wanted)
    except msgspec.ValidationError as error:
        raise _of_validation(str(error)) from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # malformed JSON, bytes that are no UTF-8, too many brackets
        reason = " ".join(str(error).split())[:200] or "it is nested too deeply"
        raise Fault("invalid_request", f"the body is not valid JSON: {reason}", code="invalid_json") from None


def convert(value: Any, wanted: type[_T], *, strict: bool = True) -> _T:
    """What was parsed as what a type says. Raises Fault, with the name of the field that is wrong.

    strict: False: numbers may come as text, as in the query of an address.
    """
    try:
        return msgspec.convert(value, type=wanted, strict=strict)
    except msgspec.ValidationError as error:
        raise _of_validation(str(error)) from None


def _of_validation(text: str) -> Fault:
    place = _PLACE.search(text)
    path = place["path"].removeprefix(".").replace("[...]", "") if place else ""
    said = text[: place.start()] if place else text
    if unknown := _UNKNOWN.match(said):
        field = f"{path}.{unknown['name']}" if path else unknown["name"]
        return unsupported(field, "it is not known or not supported here; leave it out")
    if missing := _MISSING.match(said):
        field = f"{path}.{missing['name']}" if path else missing["name"]
        return Fault("invalid_request", f"{field} is missing", field=field, code="missing_required_parameter")
    where = f"{path}: " if path else "the body: "
    return Fault("invalid_request", where + said.replace("`", ""), field=path or None)


def of_error(error: OffspecError) -> Fault:
    """The fault that an engine's error is for a client, which is not told what concerns the server alone."""
    match error:
        case ContextLengthError():
            return Fault("invalid_request", str(error), code="context_length_exceeded")
        case RequestError():
            named = _NAMED.match(str(error))
            return Fault("invalid_request", str(error), field=named["name"] if named else None)
        case ClosedError():
            return Fault("unavailable", "the server is stopping", retry_after=5)
        case CapacityError():
            return Fault("server", f"the answer was broken off: {error}")
    return Fault("server", "the answer was broken off by an error, which the server's log names")
