"""Fixtures of tests that follow plans; see `support/plan_fixtures.py`."""

from tests.support.plan_fixtures import asked, pair, world

__all__ = ["asked", "pair", "world"]
