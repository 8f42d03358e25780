"""Panics of Rust libraries, which reach Python as a BaseException that is not an Exception.

Rust first writes a line to stderr ("thread ... panicked at ..."), and only Rust code can set another hook.
The line is kept: redirecting descriptor 2 during a call would also swallow the output of other threads.
"""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise RuntimeError for a panic in the block, so that `except Exception` catches it."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3's class cannot be imported
            raise
        raise RuntimeError(str(error)) from error
