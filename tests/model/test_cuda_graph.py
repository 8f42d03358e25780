"""Steps replayed as CUDA graphs: results in new memory, unchanged streams, and failed captures."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from offspec.core.events import Notice
from offspec.model.fused.cache import FusedCache, FusedRows
from offspec.model.fused.cuda_graph import CudaGraphRunner
from offspec_kernels.tree_mask import TreeMask

pytestmark = pytest.mark.gpu

CAPACITY, HIDDEN, SIZE = 256, 8, 4
CACHE = FusedCache(1, 1, CAPACITY, SIZE, torch.float32, torch.device("cpu"))  # not used by any step here


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


class _Layers:
    """Return twice the states, plus the cache row of each; `trouble` is called during a capture."""

    def __init__(self) -> None:
        self.trouble: dict[int, Any] = {}
        self.calls = 0

    def __call__(self, hidden: torch.Tensor, turn: Any, rows: Sequence[FusedRows]) -> torch.Tensor:
        self.calls += 1
        if len(hidden) in self.trouble and torch.cuda.is_current_stream_capturing():
            self.trouble[len(hidden)](hidden)
        return 2 * hidden + _places(rows)[:, None]


def _places(rows: Sequence[FusedRows]) -> torch.Tensor:
    (only,) = rows
    assert isinstance(only.to, torch.Tensor)
    return only.to


def _run(steps: CudaGraphRunner, value: float, rows: int, start: int) -> torch.Tensor:
    device = torch.device("cuda", torch.cuda.current_device())
    hidden = torch.full((rows, HIDDEN), value, device=device)
    turn = torch.zeros(rows, 1, SIZE, device=device)
    tree_mask = TreeMask.of(
        torch.ones(rows, rows, dtype=torch.bool, device=device),
        prefix=start,
        position=torch.arange(start, start + rows, device=device),
    )
    return steps.run(hidden, (turn, turn), tree_mask, start, CACHE)


def _expected(value: float, rows: int, start: int) -> torch.Tensor:
    return 2 * value + torch.arange(start, start + rows)[:, None].expand(-1, HIDDEN).float()


def _refuse(hidden: torch.Tensor) -> None:
    raise ValueError("not this size\nsource and trace")


def _wait(hidden: torch.Tensor) -> None:
    hidden.cpu()


def test_steps_of_any_width_are_replayed(device: torch.device) -> None:
    """A result stays valid after the next replay."""
    layers = _Layers()
    steps = CudaGraphRunner(layers, device)
    assert steps.can_run(64) and not steps.can_run(65)
    for rows in (64, 33, 1):
        _run(steps, 1.0, rows, 0)
    calls = layers.calls
    cases = [(3.0, 64, 7), (2.0, 33, 9), (4.0, 40, 20), (5.0, 1, 7), (6.0, 1, 9)]
    found = [_run(steps, *one) for one in cases]
    for one, result in zip(cases, found, strict=True):
        assert torch.equal(result.cpu(), _expected(*one))
    assert layers.calls == calls


@pytest.mark.parametrize("trouble", [_refuse, _wait])
def test_a_failed_capture_affects_one_size_and_is_reported(trouble: Any, device: torch.device) -> None:
    layers, notices = _Layers(), list[Any]()
    layers.trouble = {8: trouble, 4: trouble}
    steps = CudaGraphRunner(layers, device, notices.append)
    before = torch.cuda.current_stream(device)
    for turn in range(2):
        for rows in (7, 3, 2, 16):
            assert torch.equal(_run(steps, 1.0, rows, turn).cpu(), _expected(1.0, rows, turn))
            assert torch.cuda.current_stream(device) == before
    (notice,) = notices
    assert isinstance(notice, Notice) and "steps of 8 rows" in notice.text and "\n" not in notice.text
    calls = layers.calls
    for rows in (2, 16):
        _run(steps, 1.0, rows, 0)
    assert layers.calls == calls, "these have graphs"
    _run(steps, 1.0, 7, 0)
    assert layers.calls == calls + 1, "this one is not tried again"


def _seen(hidden: torch.Tensor, tree_mask: TreeMask) -> torch.Tensor:
    """Numbers of the mask instead of states: its lengths, and the bits of each row."""
    bits = (tree_mask.words[0][:, :, None] >> torch.arange(64, device=hidden.device)) & 1
    lengths = torch.cat([tree_mask.prefix, tree_mask.first, tree_mask.count, tree_mask.causal])
    return torch.cat([bits.sum(dim=(1, 2))[:, None], lengths.expand(len(hidden), 4)], dim=1).float()


@pytest.mark.parametrize("of_host", [False, True])
def test_a_graph_uses_the_mask_of_its_own_step(of_host: bool, device: torch.device) -> None:
    """Layers read lengths from the device, or from the host, which no graph allows."""

    def layers(hidden: torch.Tensor, turn: Any, rows: Sequence[FusedRows]) -> torch.Tensor:
        mask = rows[0].tree_mask
        seen = _seen(hidden, mask)
        return seen + mask.extents()[0].keys if of_host else seen

    steps = CudaGraphRunner(layers, device)
    for first, prefix in ((100, 7), (0, 20), (70, 9), (3, 30), (3, 31)):  # tree rows that ran before
        hidden, turn = torch.zeros(3, HIDDEN, device=device), torch.zeros(3, 1, SIZE, device=device)
        sees = torch.ones(3, first + 3, dtype=torch.bool).tril(first)
        mask = TreeMask.of(
            sees, prefix=prefix, device=device, position=torch.arange(first + 3, device=device) + prefix
        )
        found = steps.run(hidden, (turn, turn), mask, prefix + first, CACHE).cpu()
        expected = [[first + 1 + row, prefix, first, 3, 0] for row in range(3)]
        assert torch.equal(found, torch.tensor(expected) + of_host * mask.extents()[0].keys * 1.0)


def test_a_failed_step_writes_nothing_later(device: torch.device) -> None:
    """Work launched by a failed warm-up finishes before later steps."""
    cache = torch.zeros(CAPACITY, HIDDEN, device=device)

    def layers(hidden: torch.Tensor, turn: Any, rows: Sequence[FusedRows]) -> torch.Tensor:
        cache[_places(rows)] = hidden
        if torch.cuda.current_stream(device) != before:
            raise RuntimeError("no room aside")
        return hidden

    before = torch.cuda.current_stream(device)
    steps = CudaGraphRunner(layers, device)
    for value, rows in ((0.0, 2), (1.0, 4), (2.0, 2)):
        _run(steps, value, rows, 5)
    torch.cuda.synchronize(device)
    assert cache[5:9, 0].tolist() == [2, 2, 1, 1]
