"""Fixtures of tests that follow plans; see `support/plan_fixtures.py`."""

from tests.support.plan_fixtures import few_prompts, pair, plan_env

__all__ = ["few_prompts", "pair", "plan_env"]
