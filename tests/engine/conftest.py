"""Fixtures of the engine tests; for plans see `support/plan_world.py`."""

import threading
from collections.abc import Callable, Iterator
from functools import partialmethod

import pytest
import torch

from offspec.core.events import Event
from offspec.engine.pass_runner import PassRunner
from offspec.engine.sequence import RunningSequence
from offspec.plan.measure_target import PassBenchmark
from tests.support.answers import TargetAndDrafts, write_trio
from tests.support.plan_fixtures import few_prompts, pair, plan_env
from tests.support.waiting import wait_until

__all__ = ["few_prompts", "pair", "plan_env"]


@pytest.fixture(scope="module", autouse=True)
def short_trials() -> Iterator[None]:
    """Shorten the trials of paused drafting: passes of tiny models take a millisecond, so a few suffice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PassBenchmark, "measure", partialmethod(PassBenchmark.measure, seconds=0.02))
        yield


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """Disable TF32, which would turn clear decisions into near-ties on a GPU."""
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="session")
def trio(tmp_path_factory: pytest.TempPathFactory) -> TargetAndDrafts:
    """Models that tests must not change."""
    return write_trio(tmp_path_factory.mktemp("trio"))


@pytest.fixture
def hold_passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], threading.Event]:
    """Return a function that blocks after some passes until an event is set or all requests are halted.

    So what a test does in the midst of an answer is done in its midst, however slow the test's thread is.
    """

    def hold(passes: int) -> threading.Event:
        gate, step, left = threading.Event(), PassRunner.step, passes

        def held(own: PassRunner, requests: list[RunningSequence]) -> list[list[Event]]:
            nonlocal left
            left -= 1
            if left < 0:
                wait_until(lambda: gate.is_set() or all(request.halted for request in requests))
            return step(own, requests)

        monkeypatch.setattr(PassRunner, "step", held)
        return gate

    return hold
