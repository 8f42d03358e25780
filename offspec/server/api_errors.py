"""Error responses, and their format in each API."""

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

# HTTP status, then the error type in the APIs of OpenAI, Anthropic and llama.cpp.
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
CLIENT_GONE = 499  # status that nginx logs when a client disconnects; no client receives it


class ApiError(Exception):
    """Error response to a request.

    Args:
        kind: Kind of error; determines the HTTP status.
        message: One line for the user.
        field: Invalid part of the body, such as "messages[0].content", or None.
        code: Machine-readable code, such as "model_not_found".
        retry_after: Seconds after which to retry; None if a retry cannot help.
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
        """HTTP status."""
        return _KINDS[self.kind][0]


def internal() -> ApiError:
    """Return the error for an unexpected exception."""
    return ApiError("server", "internal error: see the server's log")


def invalid(field: str, why: str, code: str | None = None) -> ApiError:
    """Return the error for a field with an invalid value. why: the reason, for the message."""
    return ApiError("invalid_request", f"{field}: {why}", field=field, code=code)


def missing(field: str) -> ApiError:
    """Return the error for a missing field."""
    code = "missing_required_parameter"
    return ApiError("invalid_request", f"{field} is missing", field=field, code=code)


def unsupported(field: str, why: str = "not supported here; omit it") -> ApiError:
    """Return the error for an unsupported field."""
    return invalid(field, why, "unsupported_parameter")


def refuse(body: Any, harmless: Mapping[str, Any]) -> None:
    """Raise ApiError if a field of a body is neither None nor its harmless value."""
    for name, value in harmless.items():
        if getattr(body, name) not in (None, value):
            raise unsupported(name)


def api_error_from(error: OffspecError) -> ApiError:
    """Return the API error for an engine's error, without details that are only for the server's log."""
    match error:
        case RequestError():
            return ApiError("invalid_request", str(error), field=error.field, code=error.code)
        case ClosedError():
            return ApiError("unavailable", "the server is stopping", retry_after=5)
        case CapacityError():
            return ApiError("server", f"the answer was aborted: {error}")
    return ApiError("server", "the answer was aborted by an error: see the server's log")


def openai_error(error: ApiError) -> dict[str, Any]:
    """Return the body of an error in OpenAI's format."""
    kind = _KINDS[error.kind][1]
    return {"error": {"message": error.message, "type": kind, "param": error.field, "code": error.code}}


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """Return the body of an error in Anthropic's format."""
    return {"type": "error", "error": {"type": _KINDS[error.kind][2], "message": error.message}}


def llama_cpp_error(error: ApiError) -> dict[str, Any]:
    """Return the body of an error in llama.cpp's format."""
    return {"error": {"code": error.status, "message": error.message, "type": _KINDS[error.kind][3]}}


def ollama_error(error: ApiError) -> dict[str, Any]:
    """Return the body of an error in Ollama's format."""
    return {"error": error.message}
