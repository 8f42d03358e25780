"""Products of settings, of which `make test` takes a few and `make test-all` the rest."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def some(values: Iterable[Any], *kept: Any, rare: Callable[[Any], bool] = lambda value: False) -> list[Any]:
    """Values of a parameter, or tuples of several, of which all but `kept` are marked exhaustive.

    rare: which of them are marked slow instead.
    """
    found = list(values)
    assert set(kept) <= set(found), "what is kept is among them"
    exhaustive, slow = pytest.mark.exhaustive, pytest.mark.slow
    return [
        value if value in kept else _marked(value, slow if rare(value) else exhaustive) for value in found
    ]


def _marked(value: Any, mark: pytest.MarkDecorator) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark)
