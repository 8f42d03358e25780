"""A loaded model while it runs: counters of its bytes, recovery from a cancelled pass, and its end."""

from collections.abc import Callable
from pathlib import Path

import torch

from offspec.core.events import Event, unheard
from offspec.model.cache import TreeCache
from offspec.model.expert_parts import attach
from offspec.model.fused.forward import LeanModel, lean_model
from offspec.model.loading import LoadableModel
from offspec.model.quantize.resident_layers import RoundedLayers
from offspec.stream.workers import BytesMoved, RingStats


class LoadedModel(LoadableModel):
    """A model with its weights in memory or streamed, and a cache."""

    @property
    def is_loaded(self) -> bool:
        """Whether it holds weights."""
        return self._feeder is not None

    @property
    def resident_layers(self) -> tuple[int, ...]:
        """Layers that have their weights between passes, too."""
        return self._feeder.resident if self._feeder else ()

    @property
    def bytes_moved(self) -> BytesMoved:
        """Bytes of weights streamed and read from disk so far, at one moment, read-ahead included.

        Streamed are those copied to GPUs, and those read from disk for weights that the CPU computes with.
        """
        return self._feeder.bytes_moved if self._feeder else BytesMoved()

    @property
    def ring_stats(self) -> RingStats:
        """Counters of the ring that feeds the layers."""
        return self._feeder.ring_stats if self._feeder else RingStats()

    @property
    def unpinned_bytes(self) -> int:
        """Bytes of RAM that are copied to a device from, and could not be pinned."""
        block = self.tree_model.cache.block
        weights = self._feeder.unpinned_bytes if self._feeder else 0
        return weights + (0 if block.pinned else block.nbytes)

    @property
    def buffered_files(self) -> set[Path]:
        """Files whose file system refuses O_DIRECT."""
        return self._reader.buffered

    @property
    def row_devices(self) -> list[torch.device]:
        """Of each layer of the cache, where it is computed."""
        rows = len(self.tree_model.cache.rows)
        return [*(binder.device for binder in self.layers), *[self.device] * rows][:rows]

    def lean(self, capacity: int, notify: Callable[[Event], None] = unheard) -> LeanModel | None:
        """A faster model that takes the place of `tree_model`; None where there is none for this one.

        Only for a model whose layers are all in memory; they are taken over. capacity: of its cache; notify:
        takes a Notice where CUDA graphs of its steps cannot be made.
        """
        rounded = self._feeder if isinstance(self._feeder, RoundedLayers) else None

        def release(index: int) -> None:
            self.layers[index].unbind()
            if rounded is not None:
                rounded.release(index)

        self.tree_model.cache = self.new_cache(capacity)  # the old memory goes before new is taken
        model = lean_model(self.skeleton, capacity, self.device, release, rounded, notify)
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
        """Stop reading, close files, drop the weights. May be called twice."""
        if self._feeder is not None:
            self._feeder.close()
        if self.store is not None:
            self.store.close()  # again, unless loading went no further
            attach(self.experts, None)
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
