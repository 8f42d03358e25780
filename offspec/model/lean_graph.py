"""Steps at fixed shapes, so that a CUDA device can replay each as one graph.

A step's rows are padded to a power of two; keys and values are looked at over the cache's whole capacity,
with a mask over what is not there. Nothing depends on this but speed: where a graph cannot be captured, the
same work runs operation by operation.

Letters: T rows of a step, P those of its graph, C capacity, H hidden size, D head size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_MOST_ROWS = 32
PADDING = _MOST_ROWS  # rows that a cache needs behind those in use

Turn = tuple[torch.Tensor, torch.Tensor]
Masks = dict[int | None, torch.Tensor]
Layers = Callable[[torch.Tensor, Turn, Masks, torch.Tensor, int], torch.Tensor]


@dataclass(slots=True)
class _Step:
    """The buffers of one graph. hidden [P, H]; turn: two of [P, 1, D]; masks by window [P, C]; rows [P]."""

    hidden: torch.Tensor
    turn: Turn
    masks: Masks
    rows: torch.Tensor
    out: torch.Tensor | None = None
    graph: torch.cuda.CUDAGraph | None = None


class GraphedSteps:
    """Runs `layers` over padded buffers; one graph for each count of rows, captured at its first use."""

    def __init__(self, layers: Layers, device: torch.device) -> None:
        self._layers = layers
        self._device = device
        self._steps: dict[int, _Step] = {}
        self._graphs = device.type == "cuda"
        # One stream and one pool of memory for all captures: steps never run at the same time.
        self._aside: torch.cuda.Stream | None = None
        self._pool: Any = None

    def takes(self, count: int) -> bool:
        return count <= _MOST_ROWS

    def forget(self) -> None:
        """Drop all graphs: the cache has moved, or is closed."""
        self._steps.clear()

    def run(self, hidden: torch.Tensor, turn: Turn, masks: Masks, start: int, capacity: int) -> torch.Tensor:
        """Embeddings [T, H] to final hidden states [T, H]; their keys and values go to rows from `start` on.

        turn: cos and sin [T, 1, D]; masks by window [T, start + T]. The result is the caller's own.
        """
        count = len(hidden)
        padded = 1 << (count - 1).bit_length()
        assert start + padded <= capacity, "padding writes rows behind the step's own"
        step = self._steps.get(padded)
        if step is None:
            step = self._steps[padded] = _make(padded, hidden, turn, masks, capacity)
        step.hidden[:count].copy_(hidden)
        for kept, new in zip(step.turn, turn, strict=True):
            kept[:count].copy_(new)
        torch.arange(start, start + padded, out=step.rows)
        for window, mask in masks.items():
            kept = step.masks[window].fill_(float("-inf"))
            kept[:count, : mask.shape[1]].copy_(mask)
            kept[count:, 0] = 0  # nobody asks what padding sees, but a softmax over nothing is no number
        return self._through(step, capacity)[:count].clone()

    def _through(self, step: _Step, capacity: int) -> torch.Tensor:
        if self._graphs and step.graph is None:
            self._capture(step, capacity)
        if step.graph is not None and step.out is not None:
            step.graph.replay()
            return step.out
        return self._layers(step.hidden.clone(), step.turn, step.masks, step.rows, capacity)

    def _capture(self, step: _Step, capacity: int) -> None:
        """Record the step, after a run aside in which libraries make what they cannot make in a capture."""

        def work() -> torch.Tensor:
            return self._layers(step.hidden.clone(), step.turn, step.masks, step.rows, capacity)

        before = torch.cuda.current_stream(self._device)
        try:
            if self._aside is None:
                self._aside = torch.cuda.Stream(self._device)
                self._pool = torch.cuda.graph_pool_handle()
            self._aside.wait_stream(before)
            with torch.cuda.stream(self._aside):
                work()
            before.wait_stream(self._aside)
            graph = torch.cuda.CUDAGraph()
            # Only this thread's calls count: others go on copying layers meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._aside, capture_error_mode="thread_local"
            ):
                step.out = work()
            step.graph = graph
        except RuntimeError:  # an operation that cannot be captured, or no memory for the graph's own
            step.graph = step.out = None
            self._graphs = False
        finally:
            torch.cuda.set_stream(before)  # a capture that fails does not give it back


def _make(padded: int, hidden: torch.Tensor, turn: Turn, masks: Masks, capacity: int) -> _Step:
    """Buffers of P rows, all of them numbers: what lies in padding is computed with."""
    cos, sin = (kept.new_zeros(padded, *kept.shape[1:]) for kept in turn)
    return _Step(
        hidden=hidden.new_zeros(padded, hidden.shape[1]),
        turn=(cos, sin),
        masks={window: mask.new_zeros(padded, capacity) for window, mask in masks.items()},
        rows=torch.zeros(padded, dtype=torch.long, device=hidden.device),
    )
