"""Fixtures for tests of the command line."""

import sys
from collections.abc import Callable

import pytest
from typer.testing import CliRunner, Result

from tests.support import fake_loading as scripted


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> scripted.Script:
    """The script that the engine follows in this test; change it before `offspec` is called."""
    script = scripted.Script()
    monkeypatch.setitem(sys.modules, "offspec.engine.load", scripted.module(script))
    return script


@pytest.fixture
def offspec(script: scripted.Script) -> Callable[..., Result]:
    """Call the program in this process: `offspec("generate", "demo", "hi", input=...)`."""

    def call(*args: str, input: str | bytes | None = None) -> Result:
        from offspec.ui.cli.main import app

        return CliRunner().invoke(app, args, input=input, prog_name="offspec")

    return call
