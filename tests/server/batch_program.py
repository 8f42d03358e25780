"""Runs a batch in a process that a test may kill; arguments: IN OUT [MOST].

Its answers depend on the prompt and the seed only: without a model the process starts sooner. After MOST
results it waits to be killed.
"""

import random
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

from offspec.core.config import SamplingParams
from offspec.core.events import Event, ignore_event
from offspec.server.batch.lines import read_lines
from offspec.server.batch.offline_run import BatchRun
from offspec.server.batch.results import ResultFile
from offspec.server.service import Service
from offspec.server.settings import Settings
from tests.support.fake_engine import ScriptedEngine


class RandomAnswers(ScriptedEngine):
    """Returns a different answer for each prompt and seed, after a short delay."""

    def stream(
        self, prompt: Any, params: SamplingParams | None = None, **more: Any
    ) -> Generator[Event, None, None]:
        assert params is not None
        chance = random.Random(f"{self.decode_with_special(prompt)} {params.seed}")
        self.answers = (" ".join(f"w{chance.randrange(1000)}" for _ in range(chance.randint(1, 20))),)
        yield from super().stream(prompt, params, **more)


class BoundedResults(ResultFile):
    """Accepts a limited number of results."""

    most = sys.maxsize

    def add(self, name: str, result: dict[str, Any]) -> None:
        while len(self.done) >= self.most:
            signal.pause()
        super().add(name, result)


def main() -> None:
    requests, out, *most = sys.argv[1:]
    with BoundedResults(Path(out)) as results:
        results.most = int(most[0]) if most else sys.maxsize
        service = Service(RandomAnswers(delay=0.004).opened, Settings(served_model_names=("tiny",)))
        BatchRun(service, results, ignore_event).run(read_lines(Path(requests)))


if __name__ == "__main__":
    main()
