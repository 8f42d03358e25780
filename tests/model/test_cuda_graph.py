"""Steps replayed as CUDA graphs: results of the caller's own, streams as they were, and sizes that fail."""

from typing import Any

import pytest
import torch

from offspec.core.events import Notice
from offspec.model.fused.cuda_graph import GraphedSteps
from offspec_kernels.tree_mask import TreeMask

pytestmark = pytest.mark.gpu

CAPACITY, HIDDEN, SIZE = 256, 8, 4


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


class _Layers:
    """Twice the states, and the row of the cache that each goes to; `trouble` is called in a capture."""

    def __init__(self) -> None:
        self.trouble: dict[int, Any] = {}
        self.calls = 0

    def __call__(
        self, hidden: torch.Tensor, turn: Any, tree_mask: Any, rows: torch.Tensor, end: int
    ) -> torch.Tensor:
        self.calls += 1
        if len(hidden) in self.trouble and torch.cuda.is_current_stream_capturing():
            self.trouble[len(hidden)](hidden)
        return 2 * hidden + rows[:, None]


def _run(steps: GraphedSteps, value: float, rows: int, start: int) -> torch.Tensor:
    device = torch.device("cuda", torch.cuda.current_device())
    hidden = torch.full((rows, HIDDEN), value, device=device)
    turn = torch.zeros(rows, 1, SIZE, device=device)
    tree_mask = TreeMask.of(
        torch.ones(rows, rows, dtype=torch.bool, device=device),
        prefix=start,
        position=torch.arange(start, start + rows, device=device),
    )
    return steps.run(hidden, (turn, turn), tree_mask, start, CAPACITY)


def _expected(value: float, rows: int, start: int) -> torch.Tensor:
    return 2 * value + torch.arange(start, start + rows)[:, None].expand(-1, HIDDEN).float()


def _refuse(hidden: torch.Tensor) -> None:
    raise ValueError("not this size\nsource and trace")


def _wait(hidden: torch.Tensor) -> None:
    hidden.cpu()


def test_a_result_outlives_the_next_replay(device: torch.device) -> None:
    steps = GraphedSteps(_Layers(), device)
    found = [_run(steps, value, 3, start) for value, start in ((1.0, 5), (2.0, 9), (3.0, 20))]
    for result, (value, start) in zip(found, ((1.0, 5), (2.0, 9), (3.0, 20)), strict=True):
        assert torch.equal(result.cpu(), _expected(value, 3, start))


def test_steps_as_wide_as_they_come_are_replayed(device: torch.device) -> None:
    layers = _Layers()
    steps = GraphedSteps(layers, device)
    assert steps.takes(64) and not steps.takes(65)
    for rows in (64, 33, 1):
        _run(steps, 1.0, rows, 0)
    calls = layers.calls
    for rows in (64, 33, 40, 1):
        assert torch.equal(_run(steps, 3.0, rows, 7).cpu(), _expected(3.0, rows, 7))
    assert layers.calls == calls


@pytest.mark.parametrize("trouble", [_refuse, _wait])
def test_a_size_that_fails_is_alone_and_told_of(trouble: Any, device: torch.device) -> None:
    layers, told = _Layers(), list[Any]()
    layers.trouble = {8: trouble, 4: trouble}
    steps = GraphedSteps(layers, device, told.append)
    before = torch.cuda.current_stream(device)
    for turn in range(2):
        for rows in (7, 3, 2, 16):
            assert torch.equal(_run(steps, 1.0, rows, turn).cpu(), _expected(1.0, rows, turn))
            assert torch.cuda.current_stream(device) == before
    (notice,) = told
    assert isinstance(notice, Notice) and "steps of 8 rows" in notice.text and "\n" not in notice.text
    calls = layers.calls
    for rows in (2, 16):
        _run(steps, 1.0, rows, 0)
    assert layers.calls == calls, "these have their graphs"
    _run(steps, 1.0, 7, 0)
    assert layers.calls == calls + 1, "this one is not tried again"
