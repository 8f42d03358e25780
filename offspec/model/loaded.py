"""Loaded model: byte counters, recovery from a cancelled pass, and closing."""

from collections.abc import Callable
from pathlib import Path

import torch

from offspec.core.events import Event, ignore_event
from offspec.model.cache import TreeCache
from offspec.model.fused.model import FusedModel, build_fused_model
from offspec.model.loading import LoadableModel
from offspec.model.quantize.quantized_layers import QuantizedLayers
from offspec.model.routed_experts import attach_expert_store
from offspec.stream.workers import BytesMoved, RingStats


class LoadedModel(LoadableModel):
    """Model with its weights in memory or streamed, and a cache."""

    @property
    def is_loaded(self) -> bool:
        """Whether weights are loaded."""
        return self._feeder is not None

    @property
    def resident_layers(self) -> tuple[int, ...]:
        """Layers that keep their weights between passes."""
        return self._feeder.resident if self._feeder else ()

    @property
    def bytes_moved(self) -> BytesMoved:
        """Bytes of weights streamed and read from disk so far, as one snapshot, including read-ahead.

        Streamed bytes are those copied to GPUs, and those read from disk for layers computed on the CPU.
        """
        return self._feeder.bytes_moved if self._feeder else BytesMoved()

    @property
    def ring_stats(self) -> RingStats:
        """Statistics of the ring buffer that layers are streamed through."""
        return self._feeder.ring_stats if self._feeder else RingStats()

    @property
    def unpinned_bytes(self) -> int:
        """Bytes of RAM used as a source of copies to a device that could not be pinned."""
        block = self.tree_model.cache.block
        weights = self._feeder.unpinned_bytes if self._feeder else 0
        return weights + (0 if block.pinned else block.nbytes)

    @property
    def buffered_files(self) -> set[Path]:
        """Files on file systems without O_DIRECT support."""
        return self._reader.buffered

    @property
    def row_devices(self) -> list[torch.device]:
        """Compute device of each cache layer."""
        rows = len(self.tree_model.cache.rows)
        return [*(binder.device for binder in self.layers), *[self.device] * rows][:rows]

    def fused_model(self, capacity: int, notify: Callable[[Event], None] = ignore_event) -> FusedModel | None:
        """Replace `tree_model` with a faster model and return it; return None if the model is not supported.

        All layers must be in memory; the fused model takes over their weights.

        Args:
            capacity: Positions of the cache.
            notify: Receives a Notice if CUDA graphs of the steps cannot be captured.
        """
        quantized = self._feeder if isinstance(self._feeder, QuantizedLayers) else None

        def release(index: int) -> None:
            self.layers[index].unbind()
            if quantized is not None:
                quantized.release(index)

        self.tree_model.cache = self.new_cache(capacity)  # frees the old memory before allocating the new
        model = build_fused_model(self.skeleton, capacity, self.device, release, quantized, notify)
        if model is not None:
            self._tree_model = None
        return model

    def recover(self) -> None:
        """Make the model usable again after a pass was cancelled."""
        if self._feeder is not None:
            self._feeder.recover()
        if self._tree_model is not None:
            self._tree_model.cache.rewind(self._tree_model.cache.length)

    def close(self) -> None:
        """Stop reading, close files and drop the weights. May be called twice."""
        if self._feeder is not None:
            self._feeder.close()
        if self.store is not None:
            self.store.close()  # may already be closed by the feeder, unless loading failed early
            attach_expert_store(self.experts, None)
            self.store = None
        if self._gather is not None:
            self._gather.close()
        for binder in self._rest:
            binder.unbind()
        self._reader.close()
        self.rest_tensors = {}
        if self._tree_model is not None:
            self._tree_model.cache.close()
            self._tree_model.cache = TreeCache(0, 0)  # the skeleton's layers still refer to the model
        self._feeder = self._gather = self._tree_model = None
        self._scratches = {}
