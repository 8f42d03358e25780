"""Fixtures for tests of the command line."""

import sys
from collections.abc import Callable

import pytest
from typer.testing import CliRunner, Result

from offspec.ui.cli import checks
from tests.support.fake_engine import Script, ScriptedEngine, ScriptedLoad
from tests.ui.cli.program import LOADING, TEXT


@pytest.fixture
def engine() -> ScriptedEngine:
    """The engine loaded in this test; change its answers before calling `offspec`."""
    engine = ScriptedEngine([Script(TEXT, pass_tokens=2)])
    engine.loud = True
    return engine


@pytest.fixture
def load(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> ScriptedLoad:
    notice = "reads are buffered: this file system [tmpfs] has no O_DIRECT"
    load = ScriptedLoad(engine, progress=LOADING, notices=[notice])
    monkeypatch.setitem(sys.modules, "offspec.engine.load", load.as_module())
    monkeypatch.setattr(checks, "check_files", lambda config, plan=None: None)  # the named files do not exist
    return load


@pytest.fixture
def offspec(load: ScriptedLoad) -> Callable[..., Result]:
    """Call the program in this process: `offspec("generate", "demo", "hi", input=...)`."""

    def call(*args: str, input: str | bytes | None = None) -> Result:
        from offspec.ui.cli.main import app

        return CliRunner().invoke(app, args, input=input, prog_name="offspec")

    return call
