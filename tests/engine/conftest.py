"""Fixtures of tests of engines; for those that follow plans see `support/plan_world.py`."""

from collections.abc import Iterator
from functools import partialmethod

import pytest

from offspec.plan.measure_target import PassTrial
from tests.support.plan_world import asked, pair, world

__all__ = ["asked", "pair", "world"]


@pytest.fixture(scope="module", autouse=True)
def short_trials() -> Iterator[None]:
    """Passes of tiny models are over in a millisecond: a few of each kind tell what they take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PassTrial, "measure", partialmethod(PassTrial.measure, seconds=0.02))
        yield
