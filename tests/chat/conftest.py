"""A disk that fills up."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Errors of a simulated disk: writes raise the first of these while there is one."""
    errors: list[int] = []
    usual = os.replace

    def put(source: object, target: object) -> None:
        if errors:
            raise OSError(errors[0], os.strerror(errors[0]))
        usual(str(source), str(target))

    monkeypatch.setattr(os, "replace", put)
    yield errors
