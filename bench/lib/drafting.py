"""An engine that drafts in every pass, for figures per pass."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offspec import Engine


def always_drafting(engine: Engine) -> Engine:
    """Return the engine; with given budget and width, drafting is no longer disabled while it is slower."""
    if engine.plan is None:
        engine.set_draft_policy(replace(engine.drafting.policy, may_pause=False))
    return engine
