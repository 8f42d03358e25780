"""Draft steps at fixed shapes, which a CUDA device can replay as graphs.

A step's rows are padded to a power of two. It reads the cache at its whole capacity. The number of valid keys
and the mask are read from the device, where they change between replays. This only affects speed: a step of a
size that cannot be captured runs operation by operation.

Letters: T rows of a step, P those of its graph, C capacity, H hidden size, N kinds of rotations,
R numbers of a head that are rotated, W = ceil(C / 64).
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offspec.core.events import Event, Notice, ignore_event
from offspec.model.fused.cache import FusedCache, FusedRows
from offspec_kernels.backend import first_line
from offspec_kernels.tree_mask import BITS, TreeMask

_MOST_ROWS = 64  # maximum nodes of a draft step
PADDING = _MOST_ROWS  # rows that a cache needs after those in use

CosSin = tuple[torch.Tensor, torch.Tensor]
Layers = Callable[[torch.Tensor, CosSin, Sequence[FusedRows]], torch.Tensor]


@dataclass(slots=True)
class _Step:
    """Buffers of one graph.

    Args:
        hidden: [P, H], embeddings of the step.
        rotation: cos and sin, [P, N, R] each.
        tree_mask: Mask of P queries.
        rows: [P], row numbers within the step.
        words: Columns of the mask's words that may be nonzero.
        out: [P, H], output of the graph.
        graph: Captured graph.
        is_uncapturable: Whether the capture failed.
    """

    hidden: torch.Tensor
    rotation: CosSin
    tree_mask: TreeMask
    rows: torch.Tensor
    words: int = 0
    out: torch.Tensor | None = None
    graph: torch.cuda.CUDAGraph | None = None
    is_uncapturable: bool = False


class CudaGraphRunner:
    """Runs `layers` over padded buffers, with a graph per cache and row count, captured on first use.

    Args:
        layers: Forward of all layers.
        device: Device of the model.
        notify: Receives a Notice for the first size that cannot be captured.
    """

    def __init__(
        self, layers: Layers, device: torch.device, notify: Callable[[Event], None] = ignore_event
    ) -> None:
        self._layers = layers
        self._device = device
        self._notify = notify
        self._notified = False
        self._steps: weakref.WeakKeyDictionary[FusedCache, dict[int, _Step]] = weakref.WeakKeyDictionary()
        self._graphs = device.type == "cuda"
        # All captures share one stream and one memory pool, because steps never run concurrently.
        self._aside: torch.cuda.Stream | None = None
        self._pool: Any = None

    def can_run(self, count: int) -> bool:
        return count <= _MOST_ROWS

    def forget(self, cache: FusedCache) -> None:
        """Drop all graphs over a cache that has moved or is closed."""
        self._steps.pop(cache, None)

    def run(
        self, hidden: torch.Tensor, rotation: CosSin, tree_mask: TreeMask, start: int, cache: FusedCache
    ) -> torch.Tensor:
        """Return final hidden states [T, H] in new memory; write keys and values to cache rows from `start`.

        Args:
            hidden: [T, H], embeddings.
            rotation: cos and sin, [T, N, R] each.
            tree_mask: Mask of the T rows, which belong to one tree.
            start: First cache row of the step.
            cache: Cache of the sequence.
        """
        count = len(hidden)
        padded = 1 << (count - 1).bit_length()
        assert start + padded <= cache.capacity, "no room for the padding rows"
        steps = self._steps.setdefault(cache, {})
        step = steps.get(padded)
        if step is None:
            step = steps[padded] = _make(padded, hidden, rotation, cache.capacity)
        step.hidden[:count].copy_(hidden)
        for kept, new in zip(step.rotation, rotation, strict=True):
            kept[:count].copy_(new)
        _copy_mask(tree_mask, step)
        if self._graphs and step.graph is None and not step.is_uncapturable:
            self._capture(step, cache)
        if step.graph is not None and step.out is not None:
            step.graph.replay()
            return step.out[:count].clone()
        return self._work(step, cache)[:count].clone()

    def _work(self, step: _Step, cache: FusedCache) -> torch.Tensor:
        mask = step.tree_mask
        # Lengths cached on the host belong to an earlier step, and a capture would make them permanent. With
        # the cache cleared, reading them during a capture fails instead.
        mask.clear_cache()
        to = step.rows + (mask.prefix + mask.first)
        rows = FusedRows(slice(len(step.rows)), cache, mask, to, cache.capacity)
        return self._layers(step.hidden.clone(), step.rotation, [rows])

    def _capture(self, step: _Step, cache: FusedCache) -> None:
        """Capture the step, after a warm-up in which libraries allocate what they cannot during a capture."""
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
                # A capture synchronizes the whole device. If there is none, the warm-up must not write to the
                # cache at the same time as later steps.
                before.wait_stream(self._aside)
            graph = torch.cuda.CUDAGraph()
            # Capture calls of this thread only: other threads keep copying layers.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._aside, capture_error_mode="thread_local"
            ):
                step.out = self._work(step, cache)
            step.graph = graph
        except Exception as error:  # from Triton or torch: no memory, uncapturable operation
            step.graph = step.out = None
            step.is_uncapturable = True
            if not self._notified:
                why = f"their CUDA graph could not be captured ({first_line(error)})"
                self._notify(Notice(f"draft steps of {len(step.rows)} rows are slower: {why}"))
            self._notified = True
        finally:
            torch.cuda.set_stream(before)  # a failed capture does not restore it


def _make(padded: int, hidden: torch.Tensor, rotation: CosSin, capacity: int) -> _Step:
    """Return buffers of P rows with finite values, because padding rows are computed, too."""
    cos, sin = (kept.new_zeros(padded, *kept.shape[1:]) for kept in rotation)
    rows = torch.arange(padded, device=hidden.device)
    numbers = rows.new_zeros(4, 1, dtype=torch.int32)
    prefix, first, count, causal = numbers.unbind()
    words, position = rows.new_zeros(1, padded, -(-capacity // BITS)), rows.new_zeros(1, capacity)
    return _Step(
        hidden=hidden.new_zeros(padded, hidden.shape[1]),
        rotation=(cos, sin),
        tree_mask=TreeMask(prefix, first, count, causal, words, position, numbers=numbers),
        rows=rows,
    )


def _copy_mask(tree_mask: TreeMask, step: _Step) -> None:
    """Copy a mask to the buffers of a step's graph. Padding rows are not queries of any node."""
    graphed = step.tree_mask
    assert tree_mask.numbers is not None and graphed.numbers is not None
    graphed.numbers.copy_(tree_mask.numbers)
    rows, words = tree_mask.words.shape[1:]
    graphed.words[:, :rows, :words].copy_(tree_mask.words)
    if step.words > words:
        graphed.words[:, :, words:] = 0  # a row's number follows from its number of bits
    step.words = words
    assert tree_mask.position is not None and graphed.position is not None
    graphed.position[:, : tree_mask.position.shape[1]].copy_(tree_mask.position)
