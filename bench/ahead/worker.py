"""The measured process of `bench.ahead`: each prompt answered with drafting ahead off and on, in one engine.

It is kept apart as `bench.lib.worker` is.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bench.lib.command import printed_job
from bench.lib.process import say, say_notice
from bench.peers.worker import process_peak

if TYPE_CHECKING:
    from offspec import Engine
    from offspec.core.config import SamplingParams


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Load the engine, answer all prompts both ways, and return the passes of each answer.

    job: as `bench.lib.streamed.ask` makes it.
    """
    import offspec
    from offspec.core.config import SamplingParams

    with offspec.load(**job["load"], notify=say_notice) as engine:
        plan = engine.drafting.policy.growth
        first = SamplingParams(**{**job["params"], "max_tokens": 8}, seed=job["seed"])
        answer(engine, job["prompts"][0]["text"], first, plan.ahead)  # so that caches and threads are there
        answers = []
        for number, prompt in enumerate(job["prompts"]):
            params = SamplingParams(**job["params"], seed=job["seed"] + prompt["number"])
            for on in (False, True) if number % 2 else (True, False):
                found = answer(engine, prompt["text"], params, on)
                answers.append({"prompt": prompt["id"], "ahead": on, **found})
                say(f"  {prompt['id']:<12} {'ahead' if on else 'after'}: {len(found['passes'])} passes")
        costs = plan.costs
        return {
            "planned": plan.ahead,
            "budget": engine.budget,
            "width": engine.width,
            "link_seconds": costs.link if costs else 0.0,
            "compute_seconds": float(costs.compute_seconds(engine.budget)) if costs else 0.0,
            "process_peak_bytes": process_peak(),
            "answers": answers,
        }


def answer(engine: Engine, prompt: str | list[int], params: SamplingParams, on: bool) -> dict[str, Any]:
    """Token ids of an answer, and figures of each pass but its first, which reads the prompt."""
    from offspec.core.events import Finished, PassStats

    policy = engine.drafting.policy
    engine.follow(replace(policy, growth=replace(policy.growth, ahead=on)))
    passes, ids = list[dict[str, Any]](), list[int]()
    for event in engine.stream(prompt, params):
        if isinstance(event, PassStats):
            passes.append(
                {
                    "tokens": event.emitted,
                    "nodes": event.tree_nodes,
                    "steps": event.draft_steps,
                    "draft": event.draft_seconds,
                    "target": event.target_seconds,
                    "beside": event.hidden_seconds,
                    "computed": event.compute_seconds,
                    "bytes": event.bytes_streamed,
                }
            )
        elif isinstance(event, Finished):
            ids = list(event.result.token_ids)
    return {"token_ids": ids, "passes": passes[1:]}


if __name__ == "__main__":
    sys.exit(printed_job(work))
