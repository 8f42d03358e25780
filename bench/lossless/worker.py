"""A process with an engine that answers cases: a line of JSON for each, as soon as it is answered.

Its job comes on standard input, in JSON: `load` (of `offspec.load`), `tokens` (of a first and a second
answer), `seconds` (no case is begun after them), and `cases`, each with its `key`, `text` or `turns` (ids of
two prompts), `temperature`, `seed`, `budget`, `chunk` and `kept`. One with a `text` is a reference: it is
answered one token a pass, and the second question continues what was answered.
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
_ROOM = 1.08  # times the least memory: what libraries take differs from process to process


def work(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each case's answers, until the time is over; where no cases are given, the memories to ask them in."""
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
    """Two answers, with why each ended; of a reference also the prompts, in ids."""
    from offspec.core.config import SamplingParams
    from offspec.draft.grow.growing import GrowthPolicy
    from offspec.plan.policy import DraftPolicy

    target, codec = engine._assembly.target, engine._assembly.codec
    target.tree_model.chunk = case["chunk"]
    engine.follow(DraftPolicy(GrowthPolicy(case["budget"], _WIDTH)))
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
    told = {
        "answers": [result.token_ids for result in results],
        "ends": [result.finish_reason for result in results],
        "passes": sum(result.passes for result in results),
        "seconds": sum(result.seconds for result in results),
    }
    return {**told, "turns": turns} if reference else told


def memories(load: dict[str, Any]) -> dict[str, int | None]:
    """The least memory that is accepted, in bytes, and half way from there to what it takes at its most."""
    import offspec
    from offspec.core import memory as process_memory

    try:
        offspec.load(**{**load, "memory": 1}).close()
    except CapacityError as error:
        least = int(_ROOM * error.needed)
    else:
        raise BenchError("one byte of memory was enough")
    offspec.load(**{**load, "memory": None}).close()
    return {"tight": least, "middle": (least + max(least, process_memory.peak_bytes())) // 2, "ample": None}


def main() -> None:
    """Answer the job on standard input."""
    for found in work(json.load(sys.stdin)):
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
