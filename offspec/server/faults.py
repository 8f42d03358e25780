"""What can go wrong with a request, in no API's own shape."""

from collections.abc import Mapping
from typing import Any, Literal

from offspec.core.errors import CapacityError, ClosedError, OffspecError, RequestError

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


def invalid(field: str, why: str, code: str | None = None) -> Fault:
    """The fault of a field with a wrong value."""
    return Fault("invalid_request", f"{field}: {why}", field=field, code=code)


def missing(field: str) -> Fault:
    """The fault of a body without a field."""
    code = "missing_required_parameter"
    return Fault("invalid_request", f"{field} is missing", field=field, code=code)


def unsupported(field: str, why: str = "it is not supported here; leave it out") -> Fault:
    """The fault of a request for something that cannot be done."""
    return invalid(field, why, "unsupported_parameter")


def refuse(given: Mapping[str, Any], harmless: Mapping[str, Any]) -> None:
    """Raises Fault for a field that was given another value than None and the harmless one."""
    for name, value in given.items():
        if value is not None and value != harmless.get(name):
            raise unsupported(name)


def of_error(error: OffspecError) -> Fault:
    """The fault for an engine's error; clients do not learn about errors that concern the server alone."""
    match error:
        case RequestError():
            return Fault("invalid_request", str(error), field=error.field, code=error.code)
        case ClosedError():
            return Fault("unavailable", "the server is stopping", retry_after=5)
        case CapacityError():
            return Fault("server", f"the answer was broken off: {error}")
    return Fault("server", "the answer was broken off by an error, which the server's log names")
