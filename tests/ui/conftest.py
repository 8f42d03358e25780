"""Shared fixtures of tests that call the program in their own process."""

from collections.abc import Iterator
from functools import cache

import pytest
from typer import testing
from typer.main import get_command


@pytest.fixture(scope="session", autouse=True)
def one_command() -> Iterator[None]:
    """Cache the commands that Typer builds from functions and options at each call: they never change."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "_get_command", cache(get_command))
        yield
