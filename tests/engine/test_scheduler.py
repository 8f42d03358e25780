"""The scheduler under readers that leave, callbacks that wait, and engines that end at any moment."""

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from offspec import RequestError
from offspec.core.events import Event, PassProgress
from offspec.engine import scheduler
from offspec.engine.engine import Engine
from offspec.engine.sequence import RunningSequence
from offspec.model import devices
from tests.support.answers import PROMPT, TargetAndDrafts, sampling
from tests.support.tiny_models import tiny_engine
from tests.support.waiting import PATIENCE, wait_until

PARAMS = sampling(1.0, 6)


@pytest.fixture(scope="module")
def model(trio: TargetAndDrafts) -> Path:
    return trio.target


@pytest.mark.parametrize("streams", [False, True])
def test_closing_breaks_off_the_pass_under_way(
    streams: bool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, progressed = list[int](), RunningSequence.on_progress
    engine = tiny_engine(model, "none", budget=1)
    closing = threading.Thread(target=engine.close)

    def held(own: RunningSequence, layer: int, *given: Any) -> None:
        layers.append(layer)
        if layer == 1:
            closing.start()
            wait_until(lambda: own.halted)
        progressed(own, layer, *given)

    monkeypatch.setattr(RunningSequence, "on_progress", held)
    if streams:
        reading = threading.Thread(target=lambda: [*engine.stream(PROMPT, PARAMS)])
        reading.start()
        reading.join(PATIENCE)
    else:
        assert engine.submit(PROMPT, PARAMS).result(PATIENCE).tokens == 0
    closing.join(PATIENCE)
    assert not closing.is_alive() and max(layers) == 1


def test_a_result_that_cannot_be_made_ends_the_answer(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(devices: object) -> None:
        raise RuntimeError("CUDA error")

    with tiny_engine(model, "none", budget=1) as engine:
        expected = engine.generate(PROMPT, PARAMS).token_ids
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(devices, "peak_bytes", broken)
            with pytest.raises(RuntimeError, match="CUDA error"):
                engine.generate(PROMPT, PARAMS)
        assert engine.generate(PROMPT, PARAMS).token_ids == expected


def test_a_callback_cannot_wait_for_an_answer(model: Path) -> None:
    refused, calls = list[str](), list[Event]()

    def notify(event: Event) -> None:
        if isinstance(event, PassProgress) and not calls:
            calls.append(event)
            waits = (lambda: engine.submit([5, 6], PARAMS).result(), lambda: engine.generate_many([[5, 6]]))
            for wait in (*waits, lambda: engine.generate([5, 6]), engine.close):
                with pytest.raises(RequestError) as caught:
                    wait()
                refused.append(str(caught.value))

    with tiny_engine(model, "none", budget=1, notify=notify) as engine:
        assert engine.generate(PROMPT, PARAMS).tokens == 6
    assert len(refused) == 4 and all("another answer of this engine is running" in text for text in refused)


def test_an_engine_that_is_dropped_is_collected(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_IDLE_S", 0.01)
    engines = [tiny_engine(model, "none", budget=1)]
    expected = engines[0].generate(PROMPT, PARAMS).token_ids
    wait_until(lambda: engines[0]._scheduler._thread is None)
    assert engines[0].generate(PROMPT, PARAMS).token_ids == expected, "another thread goes on"
    kept = weakref.ref[Engine](engines.pop())

    def collected() -> bool:
        gc.collect()
        return kept() is None

    wait_until(collected)


def test_an_interrupt_as_the_last_events_arrive(model: Path) -> None:
    class Struck:
        """Queue that loses the items taken from it."""

        def __init__(self, arrived: Any) -> None:
            self.empty, self.put, self._get = arrived.empty, arrived.put, arrived.get

        def get(self) -> None:
            if self._get()[1]:
                raise KeyboardInterrupt
            raise AssertionError("there are more events")

    with tiny_engine(model, "none", budget=1) as engine:
        events = engine.stream(PROMPT, sampling(1.0, 1))
        next(events)
        (answer,) = engine._readers
        answer._arrived = Struck(answer._arrived)  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            next(events)
        assert engine.generate(PROMPT, PARAMS).tokens == 6
