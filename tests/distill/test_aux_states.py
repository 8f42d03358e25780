"""Inputs of layers, computed by a pass over existing text."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offspec.core.events import Event, ignore_event
from offspec.distill.batched_forward import Batch
from offspec.distill.eagle3 import published_taps
from offspec.distill.generate import write_taps
from offspec.distill.store import Store
from offspec.model.loaded import LoadedModel
from tests.distill.classroom import loaded, written


@pytest.mark.parametrize(
    ("layers", "taps"), [(32, (2, 16, 29)), (30, (2, 15, 27)), (4, (0, 2, 3)), (2, (0, 1)), (1, (0,))]
)
def test_the_published_layers_if_there_are_enough(layers: int, taps: tuple[int, ...]) -> None:
    assert published_taps(layers) == taps


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    model = loaded(tmp_path_factory.mktemp("model"))
    yield model
    model.close()


def test_they_are_those_of_each_text_alone(target: LoadedModel, tmp_path: Path) -> None:
    store = written(target, tmp_path / "text", batches=2)
    write_taps(store, target, (0, 2), 3, ignore_event)
    for number in range(store.passages):
        passage = store.read(number)
        batch = Batch(target, len(passage), (0, 2))
        with batch.patched_target():
            states, taps = batch.run(passage.tokens[None])
        for found, expected in zip(passage.taps, taps, strict=True):
            torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(passage.states, states[0], rtol=1e-4, atol=1e-4)


def test_existing_states_are_not_computed_again(target: LoadedModel, tmp_path: Path) -> None:
    store = written(target, tmp_path / "text", batches=3)

    def stop(event: Event) -> None:
        if getattr(event, "done", 0) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_taps(store, target, (1,), 8, stop)
    again = Store(tmp_path / "text", 32, 4)
    assert again.without_taps((1,)) == [2]
    assert again.without_taps((0, 1)) == [0, 1, 2]
    seen: list[Event] = []
    write_taps(again, target, (1,), 8, seen.append)
    assert [event.done for event in seen if hasattr(event, "done")] == [3]
    assert again.without_taps((1,)) == []
    write_taps(again, target, (1,), 8, seen.append)
    assert len(seen) == 2
