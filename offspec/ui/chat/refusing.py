"""Mistakes in the paths that a user types, which Python tells in its own ways."""

from collections.abc import Iterator
from contextlib import contextmanager

from offspec.core.errors import RequestError


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Raises RequestError, which begins with `what`, for a path that the system does not take.

    It may not be looked at, is too long, has a NUL in it, or begins with an unknown ~user.
    """
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"{what}: {reason}") from None
