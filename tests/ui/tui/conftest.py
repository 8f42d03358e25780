"""Tests of the terminal UI look for an end in shorter steps: they slept most of their time."""

from collections.abc import Iterator

import pytest
from textual import _wait

_STEP = 0.005  # seconds; a pilot looks so often, and at least twice a key, whether all has been done


@pytest.fixture(scope="module", autouse=True)
def short_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_wait, "SLEEP_GRANULARITY", _STEP)
        patch.setattr(_wait, "SLEEP_IDLE", _STEP / 20)
        yield
