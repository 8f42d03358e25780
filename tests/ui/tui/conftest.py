"""Tests of the terminal UI wait until the app is idle, and no longer."""

from collections.abc import Iterator

import pytest
from textual import app, pilot

from tests.ui.tui.idle import wait_for_idle


@pytest.fixture(scope="module", autouse=True)
def idle_when_all_is_done() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (app, pilot):
            patch.setattr(module, "wait_for_idle", wait_for_idle)
        yield
