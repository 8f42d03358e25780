"""A day of use in minutes: short requests, chats, cancels and reloads of a tiny model, one after the other.

Memory, threads and open files are printed as they go, and by how much they grow in a thousand requests, by a
straight line through the second half. A leak is a slope that stays the same however long it runs.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import numpy as np

import offspec
from offspec import Engine, RequestError, SamplingParams, TextDelta
from offspec.core.memory import resident_bytes

_MEMORY = 1_500_000_000
_TOKENS = 6
_SEQUENCES = 4


@dataclass(frozen=True, slots=True)
class Reading:
    """What the process has after so many requests."""

    requests: int
    resident_mb: float
    threads: int
    files: int


def read_process(requests: int) -> Reading:
    """What this process has now."""
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    return Reading(requests, round(resident_bytes() / 1e6, 1), threading.active_count(), files)


def slopes(readings: Sequence[Reading]) -> dict[str, float]:
    """Growth of each figure in a thousand requests, over the second half of the readings."""
    late = readings[len(readings) // 2 :]
    if len(late) < 2:
        return {}
    at = [reading.requests / 1000 for reading in late]
    names = ("resident_mb", "threads", "files")
    return {name: round(float(np.polyfit(at, [getattr(r, name) for r in late], 1)[0]), 3) for name in names}


def use(engine: Engine, random: Random) -> int:
    """One way of using it, chosen at random; how many requests that was."""
    params = SamplingParams(
        max_tokens=_TOKENS, temperature=random.choice((0.0, 1.0)), seed=random.randrange(9)
    )
    text = " ".join(f"w{random.randrange(3, 90)}" for _ in range(random.randint(1, 12)))
    way = random.randrange(4)
    if way == 0:
        engine.generate(text, params, raw=True)
        return 1
    if way == 1:
        session = engine.chat(params=params)
        for _ in range(2):
            list(session.send(text))
        session.close()
        return 2
    if way == 2:  # left in the middle
        for event in engine.stream(text, params, raw=True):
            if isinstance(event, TextDelta):
                break
        return 1
    answers = [engine.submit(f"{text} w{number}", params, raw=True) for number in range(_SEQUENCES)]
    left = answers[random.randrange(_SEQUENCES)]
    left.cancel()
    for answer in answers:
        with suppress(RequestError) if answer is left else nullcontext():  # its turn may not have come
            answer.result()
    return _SEQUENCES


def soak(model: Path, requests: int, reload: int, seed: int = 0) -> list[Reading]:
    """Use a model for so many requests, and load it again after every `reload` of them."""
    random, readings, done = Random(seed), list[Reading](), 0
    every = max(requests // 20, 1)
    while done < requests:
        with offspec.load(
            str(model), device="cpu", memory=_MEMORY, draft="lookup", budget=4, width=2, context=256,
            sequences=_SEQUENCES,
        ) as engine:  # fmt: skip
            until = min(done + reload, requests)
            while done < until:
                done += use(engine, random)
                if done // every > len(readings):
                    readings.append(read_process(done))
                    print(*asdict(readings[-1]).values(), sep="\t", flush=True)
    return readings


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("requests", type=int, nargs="?", default=20_000)
    parser.add_argument("--reload", type=int, default=500, help="requests between two loads")
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    from tests.support.tiny_models import write_model

    with tempfile.TemporaryDirectory(prefix="offspec-soak-") as folder:
        os.environ["OFFSPEC_CACHE"] = os.path.join(folder, "cache")
        model = write_model(Path(folder) / "model", num_hidden_layers=2, spread=0.2)
        print("requests", "MB", "threads", "files", sep="\t")
        readings = soak(model, wanted.requests, wanted.reload, wanted.seed)
    print("in a thousand requests:", json.dumps(slopes(readings)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
