"""Products of settings, of which `make test` takes a few and `make test-all` the rest."""

from collections.abc import Iterable
from typing import Any

import pytest


def some(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Values of a parameter, or tuples of several, of which all but `kept` are marked exhaustive."""
    found = list(values)
    assert set(kept) <= set(found), "what is kept is among them"
    return [value if value in kept else _marked(value) for value in found]


def _marked(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.exhaustive)
