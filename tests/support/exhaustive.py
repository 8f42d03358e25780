"""Products of settings: `make test` runs a few, `make test-all` the rest or a share of it."""

import zlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sampled_params(
    values: Iterable[Any], *kept: Any, rare: Callable[[Any], bool] = lambda value: False, one_in: int = 1
) -> list[Any]:
    """Return parameter values, or tuples of several, in which all except `kept` are marked exhaustive.

    Args:
        rare: Selects values that are marked slow instead.
        one_in: Mark about one in this many exhaustive and the rest slow. The choice stays the same when
            values are
            added.
    """
    found = list(values)
    assert set(kept) <= set(found), "kept values must be among the values"
    exhaustive, slow = pytest.mark.exhaustive, pytest.mark.slow
    return [
        value
        if value in kept
        else _marked(value, slow if rare(value) or _left(value, one_in) else exhaustive)
        for value in found
    ]


def _left(value: Any, one_in: int) -> bool:
    return zlib.crc32(repr(value).encode()) % one_in != 0


def _marked(value: Any, mark: pytest.MarkDecorator) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark)
