"""An engine whose passes all have a tree, for what is counted by the pass."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offspec import Engine


def always_drafting(engine: Engine) -> Engine:
    """The same engine, where its budget and width were given: drafters no longer rest while they lose."""
    if engine.plan is None:
        engine.follow(replace(engine.drafting.policy, rests=False))
    return engine
