"""Panics of libraries in Rust, which Python sees as an exception that is no Exception.

Rust itself writes a line to stderr before ("thread ... panicked at ..."), and only code in Rust can set
another hook. It stays: to turn descriptor 2 elsewhere during a call would take what other threads write
meanwhile.
"""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise RuntimeError for a panic in the block, so that `except Exception` has it."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3 gives the class no place to be imported from
            raise
        raise RuntimeError(str(error)) from error
