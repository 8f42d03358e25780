"""Faults of requests, and the shape of an error in each API."""

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

# HTTP status, and the type of the error in OpenAI's API, in Anthropic's, and in llama.cpp's.
_KINDS: dict[Kind, tuple[int, str, str, str]] = {
    "invalid_request": (400, "invalid_request_error", "invalid_request_error", "invalid_request_error"),
    "authentication": (401, "authentication_error", "authentication_error", "authentication_error"),
    "permission": (403, "permission_error", "permission_error", "permission_error"),
    "not_found": (404, "invalid_request_error", "not_found_error", "not_found_error"),
    "timeout": (408, "timeout_error", "timeout_error", "invalid_request_error"),
    "too_large": (413, "invalid_request_error", "request_too_large", "invalid_request_error"),
    "rate_limit": (429, "rate_limit_error", "rate_limit_error", "invalid_request_error"),
    "unavailable": (503, "service_unavailable_error", "overloaded_error", "unavailable_error"),
    "server": (500, "server_error", "api_error", "server_error"),
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
        return _KINDS[self.kind][0]


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


def refuse(body: Any, harmless: Mapping[str, Any]) -> None:
    """Raises Fault for a field of a body with another value than None and the harmless one."""
    for name, value in harmless.items():
        if getattr(body, name) not in (None, value):
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


def openai_error(fault: Fault) -> dict[str, Any]:
    """A fault in OpenAI's shape."""
    kind = _KINDS[fault.kind][1]
    return {"error": {"message": fault.message, "type": kind, "param": fault.field, "code": fault.code}}


def anthropic_error(fault: Fault) -> dict[str, Any]:
    """A fault in Anthropic's shape."""
    return {"type": "error", "error": {"type": _KINDS[fault.kind][2], "message": fault.message}}


def llama_cpp_error(fault: Fault) -> dict[str, Any]:
    """A fault in llama.cpp's shape."""
    return {"error": {"code": fault.status, "message": fault.message, "type": _KINDS[fault.kind][3]}}


def ollama_error(fault: Fault) -> dict[str, Any]:
    """A fault in Ollama's shape."""
    return {"error": fault.message}
