"""Fixtures of tests of engines; for those that follow plans see `support/plan_world.py`."""

import threading
from collections.abc import Callable, Iterator
from functools import partialmethod

import pytest
import torch

from offspec.core.events import Event
from offspec.engine.passes import Passes
from offspec.engine.sequence import RunningSequence
from offspec.plan.measure_target import PassTrial
from tests.support.answers import Trio, write_trio
from tests.support.plan_world import asked, pair, world
from tests.support.waiting import until

__all__ = ["asked", "pair", "world"]


@pytest.fixture(scope="module", autouse=True)
def short_trials() -> Iterator[None]:
    """Passes of tiny models are over in a millisecond: a few of each kind tell what they take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PassTrial, "measure", partialmethod(PassTrial.measure, seconds=0.02))
        yield


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """float32 that is float32 on a GPU, too: TF32 would make near-ties of what is none."""
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="session")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Trio:
    """Models that no test changes."""
    return write_trio(tmp_path_factory.mktemp("trio"))


@pytest.fixture
def hold_passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], threading.Event]:
    """Lets so many passes through; the next waits until the event is set, or all its requests are halted.

    So what a test does in the midst of an answer is done in its midst, however slow the test's thread is.
    """

    def hold(passes: int) -> threading.Event:
        gate, step, left = threading.Event(), Passes.step, passes

        def held(own: Passes, requests: list[RunningSequence]) -> list[list[Event]]:
            nonlocal left
            left -= 1
            if left < 0:
                until(lambda: gate.is_set() or all(request.halted for request in requests))
            return step(own, requests)

        monkeypatch.setattr(Passes, "step", held)
        return gate

    return hold
