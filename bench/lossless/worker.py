"""A process with an engine that answers cases, and prints a line of JSON for each answered case.

Its job is read from standard input, in JSON: `load` (of `offspec.load`), `tokens` (of the first and the
second answer), `seconds` (no case starts later), and `cases`, each with its `key`, `text` or `turns` (ids of
two prompts), `temperature`, `seed`, `budget`, `chunk` and `kept`. A case with a `text` is a reference: it is
answered one token per pass, and the second question continues its answer.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bench.lib.cgroup import BenchError
from offspec.core.errors import CapacityError

if TYPE_CHECKING:
    from offspec.core.events import Result
    from offspec.engine.engine import Engine

_ON = "\n\n# What this does, line by line:\n"
_WIDTH = 32
_ROOM = 1.08  # times the minimum memory: memory of libraries differs between processes


def work(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield each case's answers until the time is over; without cases, yield the memory limits to use."""
    import offspec

    if "cases" not in job:
        yield memories(job["load"])
        return
    with offspec.load(**job["load"]) as engine:
        end = time.monotonic() + job["seconds"]
        for case in job["cases"]:
            if time.monotonic() > end:
                break
            yield {"key": case["key"], **answer(engine, case, job["tokens"])}


def answer(engine: Engine, case: dict[str, Any], tokens: tuple[int, int]) -> dict[str, Any]:
    """Return two answers with their finish reasons; for a reference also the prompts, as ids."""
    from offspec.core.config import SamplingParams
    from offspec.draft.grow.tree_grower import GrowthPolicy
    from offspec.plan.policy import DraftPolicy

    target, codec = engine._assembly.target, engine._assembly.codec
    target.tree_model.chunk = case["chunk"]
    engine.set_draft_policy(DraftPolicy(GrowthPolicy(case["budget"], _WIDTH)))
    reference = "text" in case
    turns: list[list[int]] = [codec.encode_prompt(case["text"], True)] if reference else case["turns"]
    results: list[Result] = []
    for turn, most in enumerate(tokens):
        if turn == len(turns):
            turns.append([*turns[0], *results[0].token_ids, *codec.tokenize(_ON)])
        if turn == 0 or not case["kept"]:
            engine._states.first.forget()
        params = SamplingParams(case["temperature"], seed=case["seed"], max_tokens=most)
        results.append(engine.generate(turns[turn], params, speculate=not reference))
    answered = {
        "answers": [result.token_ids for result in results],
        "ends": [result.finish_reason for result in results],
        "passes": sum(result.passes for result in results),
        "seconds": sum(result.seconds for result in results),
    }
    return {**answered, "turns": turns} if reference else answered


def memories(load: dict[str, Any]) -> dict[str, int | None]:
    """Return the accepted minimum of memory in bytes, and the middle between it and the peak usage."""
    import offspec
    from offspec.core import memory as process_memory

    try:
        offspec.load(**{**load, "memory": 1}).close()
    except CapacityError as error:
        least = int(_ROOM * error.needed)
    else:
        raise BenchError("one byte of memory was accepted")
    offspec.load(**{**load, "memory": None}).close()
    return {"tight": least, "middle": (least + max(least, process_memory.peak_bytes())) // 2, "ample": None}


def main() -> None:
    """Answer the job on standard input."""
    for found in work(json.load(sys.stdin)):
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
