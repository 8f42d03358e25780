"""Steps at fixed shapes, so that a CUDA device can replay each as one graph.

A step's rows are padded to a power of two. Keys and values lie in the cache at its whole capacity; how many
of them there are, and who sees whom, is read from the device, where it changes between replays. Nothing
depends on this but speed: a step of a size that cannot be captured runs operation by operation.

Letters: T rows of a step, P those of its graph, C capacity, H hidden size, N kinds of rotations,
R numbers of a head that are rotated, W = ceil(C / 64).
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offspec.core.events import Event, Notice, unheard
from offspec.model.fused.cache import LeanCache, LeanRows
from offspec_kernels.backend import first_line
from offspec_kernels.tree_mask import BITS, TreeMask

_MOST_ROWS = 64  # as many as a draft step has nodes at most
PADDING = _MOST_ROWS  # rows that a cache needs behind those in use

Turn = tuple[torch.Tensor, torch.Tensor]
Layers = Callable[[torch.Tensor, Turn, Sequence[LeanRows]], torch.Tensor]


@dataclass(slots=True)
class _Step:
    """The buffers of one graph. hidden [P, H]; turn: two of [P, N, R]; tree_mask of P queries.

    rows: [P], counted from the step's first; words: columns of the mask's words that may not be nought;
    refused: whether it could not be captured.
    """

    hidden: torch.Tensor
    turn: Turn
    tree_mask: TreeMask
    rows: torch.Tensor
    words: int = 0
    out: torch.Tensor | None = None
    graph: torch.cuda.CUDAGraph | None = None
    refused: bool = False


class GraphedSteps:
    """Runs `layers` over padded buffers; a graph for each cache and count of rows, captured at its first use.

    notify: takes a Notice of the first size that cannot be captured.
    """

    def __init__(
        self, layers: Layers, device: torch.device, notify: Callable[[Event], None] = unheard
    ) -> None:
        self._layers = layers
        self._device = device
        self._notify = notify
        self._told = False
        self._steps: weakref.WeakKeyDictionary[LeanCache, dict[int, _Step]] = weakref.WeakKeyDictionary()
        self._graphs = device.type == "cuda"
        # One stream and one pool of memory for all captures: steps never run at the same time.
        self._aside: torch.cuda.Stream | None = None
        self._pool: Any = None

    def takes(self, count: int) -> bool:
        return count <= _MOST_ROWS

    def forget(self, cache: LeanCache) -> None:
        """Drop all graphs over a cache: it has moved, or is closed."""
        self._steps.pop(cache, None)

    def run(
        self, hidden: torch.Tensor, turn: Turn, tree_mask: TreeMask, start: int, cache: LeanCache
    ) -> torch.Tensor:
        """Embeddings [T, H] to final hidden states [T, H]; their keys and values go to rows from `start` on.

        turn: cos and sin [T, N, R]; tree_mask: of the T rows, in one tree. The result is the caller's own.
        """
        count = len(hidden)
        padded = 1 << (count - 1).bit_length()
        assert start + padded <= cache.capacity, "padding writes rows behind the step's own"
        steps = self._steps.setdefault(cache, {})
        step = steps.get(padded)
        if step is None:
            step = steps[padded] = _make(padded, hidden, turn, cache.capacity)
        step.hidden[:count].copy_(hidden)
        for kept, new in zip(step.turn, turn, strict=True):
            kept[:count].copy_(new)
        _show(tree_mask, step)
        if self._graphs and step.graph is None and not step.refused:
            self._capture(step, cache)
        if step.graph is not None and step.out is not None:
            step.graph.replay()
            return step.out[:count].clone()
        return self._work(step, cache)[:count].clone()

    def _work(self, step: _Step, cache: LeanCache) -> torch.Tensor:
        mask = step.tree_mask
        # Lengths that were read on the host are those of an earlier step. In a capture they would stay in the
        # graph for good; forgotten, they are read again, which no capture allows.
        mask.forget()
        to = step.rows + (mask.prefix + mask.first)
        rows = LeanRows(slice(len(step.rows)), cache, mask, to, cache.capacity)
        return self._layers(step.hidden.clone(), step.turn, [rows])

    def _capture(self, step: _Step, cache: LeanCache) -> None:
        """Record the step, after a run aside in which libraries make what they cannot make in a capture."""
        before = torch.cuda.current_stream(self._device)
        try:
            if self._aside is None:
                self._aside = torch.cuda.Stream(self._device)
                self._pool = torch.cuda.graph_pool_handle()
            self._aside.wait_stream(before)
            try:
                with torch.cuda.stream(self._aside):
                    self._work(step, cache)
            finally:
                # A capture waits for the whole device. Where there comes none, what has been sent would still
                # write to the cache when later steps do.
                before.wait_stream(self._aside)
            graph = torch.cuda.CUDAGraph()
            # Only this thread's calls count: others go on copying layers meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._aside, capture_error_mode="thread_local"
            ):
                step.out = self._work(step, cache)
            step.graph = graph
        except Exception as error:  # torch's: no memory, an operation that cannot be captured; or Triton's
            step.graph = step.out = None
            step.refused = True
            if not self._told:
                why = f"no CUDA graph of them could be made ({first_line(error)})"
                self._notify(Notice(f"draft steps of {len(step.rows)} rows take longer: {why}"))
            self._told = True
        finally:
            torch.cuda.set_stream(before)  # a capture that fails does not give it back


def _make(padded: int, hidden: torch.Tensor, turn: Turn, capacity: int) -> _Step:
    """Buffers of P rows, all of them numbers: what lies in padding is computed with."""
    cos, sin = (kept.new_zeros(padded, *kept.shape[1:]) for kept in turn)
    rows = torch.arange(padded, device=hidden.device)
    numbers = rows.new_zeros(4, 1, dtype=torch.int32)
    prefix, first, count, causal = numbers.unbind()
    words, position = rows.new_zeros(1, padded, -(-capacity // BITS)), rows.new_zeros(1, capacity)
    return _Step(
        hidden=hidden.new_zeros(padded, hidden.shape[1]),
        turn=(cos, sin),
        tree_mask=TreeMask(prefix, first, count, causal, words, position, numbers=numbers),
        rows=rows,
    )


def _show(tree_mask: TreeMask, step: _Step) -> None:
    """Copy a step's mask to where its graph looks. Rows of padding are queries of no node."""
    graphed = step.tree_mask
    assert tree_mask.numbers is not None and graphed.numbers is not None
    graphed.numbers.copy_(tree_mask.numbers)
    rows, words = tree_mask.words.shape[1:]
    graphed.words[:, :rows, :words].copy_(tree_mask.words)
    if step.words > words:
        graphed.words[:, :, words:] = 0  # rows are told from one another by how many bits they have
    step.words = words
    assert tree_mask.position is not None and graphed.position is not None
    graphed.position[:, : tree_mask.position.shape[1]].copy_(tree_mask.position)
