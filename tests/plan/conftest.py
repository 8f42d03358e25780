"""Fixtures of tests that follow plans; see `support/plan_world.py`."""

from tests.support.plan_world import asked, pair, world

__all__ = ["asked", "pair", "world"]
