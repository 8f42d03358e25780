"""The measured process of `bench.upcycle`: `bench.lib.worker`, and after each pass what its experts were.

A job's `by_need` is whether experts are read when they are asked for, or with their layers; `replan`, whether
plans of earlier runs are left aside.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

from bench.lib import worker
from bench.lib.command import printed_job

if TYPE_CHECKING:
    from offspec import Engine
    from offspec.core.events import PassStats


def watch(engine: Engine, stats: PassStats) -> dict[str, Any]:
    """`calls`: the experts of each layer's turn in the pass, by numbers of their own. After an answer's first
    pass also `slots`, and `kept`, what is in them. Nothing without a store in RAM."""
    from offspec.stream.expert_store import ExpertStore

    store = engine._assembly.target.store
    if not isinstance(store, ExpertStore):
        return {}
    calls, store.trace = store.trace or [], []
    return {"calls": calls, **({"slots": store.slots, "kept": store.kept} if stats.index == 1 else {})}


def work(job: dict[str, Any]) -> dict[str, Any]:
    """See `bench.lib.worker.work`."""
    with (
        nullcontext() if job["by_need"] else mock.patch("offspec.plan.fit._expert_needs", lambda target: None)
    ):
        return worker.work({**job, "load": {**job["load"], "replan": job["replan"]}}, watch)


if __name__ == "__main__":
    sys.exit(printed_job(work))
