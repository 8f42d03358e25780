"""Bytes of an opened model: of its weights, its cache, and a pass."""

import math
from collections.abc import Sequence
from copy import copy
from typing import Self

import torch

from offspec.checkpoint.tensors import can_slice, on_disk
from offspec.model.binding import Binder
from offspec.model.head import HeadBlock, head_blocks
from offspec.model.opened import OpenedModel
from offspec.model.row_independence import has_row_blocks
from offspec.stream.layout import lay_out
from offspec_kernels.row_linear.blocks import panel_bytes
from offspec_kernels.tree_attention import gpu_scratch_bytes, list_bytes
from offspec_kernels.tree_attention import scratch_bytes as tree_attention_scratch

# Sets of states of a text: committed, with the text in front of a pass, and a copy under way.
_STATES = 3
# Times the bytes of rows that a scan takes: in float32, and once more while they are put together.
_WIDENED = 6
_WINDOW_GAPS = 256  # bytes: stores of a layer begin at round addresses
_HEAD_VALUES = 4 << 20  # of a packed head, in a block that streams, even where layers unpack fewer at once


class SizedModel(OpenedModel):
    """An opened model with the bytes of each part and of passes, all known before weights are read."""

    @property
    def layer_bytes(self) -> list[int]:
        """Bytes that each layer takes in a slot, which are also those read for it."""
        return [binder.layout.nbytes for binder in self.layers]

    @property
    def layer_elements(self) -> list[int]:
        """Weights in each layer."""
        return [sum(p.numel() for p in layer.parameters()) for layer in self.skeleton.layers]

    @property
    def stored_bits(self) -> float:
        """Bits that a weight of the layers is stored in, on average."""
        return 8 * sum(self.layer_bytes) / sum(self.layer_elements)

    @property
    def layer_extra(self) -> list[int]:
        """Bytes that each layer takes besides, where its tensors must be converted."""
        return [binder.copied_bytes for binder in self.layers]

    @property
    def dense_bytes(self) -> list[int]:
        """Bytes of each layer without its routed experts."""
        return [binder.layout.nbytes for binder in self.dense]

    @property
    def dense_extra(self) -> list[int]:
        """Bytes that each layer takes besides, without its routed experts."""
        return [binder.copied_bytes for binder in self.dense]

    @property
    def held_bytes(self) -> list[int]:
        """Bytes that each layer takes where all of it is values in the model's dtype."""
        return [binder.kept_bytes for binder in self.layers]

    @property
    def held_extra(self) -> list[int]:
        """Bytes that each layer takes besides while it is made into such values."""
        return [binder.layout.nbytes + binder.fused_elements * self.dtype.itemsize for binder in self.layers]

    @property
    def rest_bytes(self) -> int:
        """Bytes of everything that is no layer and stays: head, final norm, positions."""
        return sum(binder.kept_bytes for binder in self._rest)

    @property
    def embedding_bytes(self) -> int:
        """Bytes of RAM that an embedding takes whose rows are not read from disk; 0 where it is the head."""
        return 0 if self._rows is None else lay_out("the embedding", on_disk(self._rows)).nbytes

    @property
    def head_bytes(self) -> int:
        """Bytes of the head, and of `rest_bytes` therefore, that may stream instead; 0 where it cannot."""
        if self._head is None or not can_slice(self._head.sources[0][0]):
            return 0
        return self._rest[1].kept_bytes

    @property
    def head_stored_bytes(self) -> int:
        """Bytes that the head takes on disk, which are those of a pass in which it streams."""
        if self._head is None:  # it is the embedding
            weight: torch.Tensor = self.skeleton.model.get_output_embeddings().weight
            return weight.numel() * self.dtype.itemsize
        return self._head.sources[0][0].nbytes

    @property
    def head_block_bytes(self) -> int:
        """Bytes of the largest unit of a head that streams."""
        return max((block.layout.nbytes for block in self._head_blocks()), default=0)

    def _head_blocks(self) -> list[HeadBlock]:
        if self._head is None or not self.head_bytes:
            return []
        return head_blocks(self._head.sources[0][0], max(self.layer_bytes), self._unpacked_in(self.layers))

    def _unpacked_in(self, layers: Sequence[Binder]) -> int:
        """Most values of packed weights that are there at once while layers run, or a head's blocks."""
        by_panels = self.device.type == "cpu" and self.uses_panels
        most = max(binder.scratch_elements(by_panels) for binder in layers)
        if self._head is not None and self._head.is_packed:
            most = max(most, min(_HEAD_VALUES, math.prod(self._head.sources[0][0].shape)))
        return most

    def with_int8_cache(self) -> Self:
        """The same with keys and values in 8 bits, to see what it would take; not to be loaded."""
        narrow = copy(self)
        narrow.int8_cache = True
        return narrow

    def cache_bytes(self, capacity: int, layers: Sequence[int] | None = None) -> int:
        """Bytes of a cache of `capacity` positions, of all layers by default."""
        each = self.position_bytes
        every = each if layers is None else [each[layer] for layer in layers if layer < len(each)]
        return capacity * sum(every)

    def layer_cache_bytes(self, capacity: int) -> int:
        """The same of the layer that takes most."""
        return capacity * max(self.position_bytes, default=0)

    def window_bytes(self, capacity: int) -> int:
        """Bytes of the keys and values of one layer, the largest, at `capacity` positions."""
        return self.layer_cache_bytes(capacity) + _WINDOW_GAPS

    @property
    def caches_move(self) -> bool:
        """Whether keys and values may live in RAM: every layer looks at its own, by our attention alone."""
        skeleton = self.skeleton
        own = sum(numbers > 0 for numbers in skeleton.rows.kept)
        return not (skeleton.masked or skeleton.closed) and own == len(skeleton.rows.products)

    @property
    def position_bytes(self) -> list[int]:
        """Bytes that a position takes in each layer of the cache."""
        kept, item = self.skeleton.rows, self.dtype.itemsize
        if not self.int8_cache:
            return [numbers * item for numbers in kept.kept]
        layers = zip(kept.kept, kept.index, kept.key_heads, strict=True)
        return [numbers + index * (item - 1) + 4 * heads for numbers, index, heads in layers]

    def state_bytes(self, rows: int, snapshots: int) -> int:
        """Bytes of what layers carry from token to token, with a tree of `rows` rows behind it."""
        kept, item = self.skeleton.rows, self.dtype.itemsize
        text = 4 * kept.state_numbers + item * kept.tail_numbers
        return text * (_STATES + snapshots) + rows * item * kept.row_numbers

    def scratch_bytes(self, rows: int, length: int, chunk: int, device: torch.device | None = None) -> int:
        """Most bytes of activations in a pass of `rows` rows over a cache of `length` positions.

        device: Where layers are computed, the model's by default.
        """
        return self.activation_bytes(rows, length, chunk, device) + self.unpacking_bytes

    @property
    def unpacking_bytes(self) -> int:
        """Bytes for values of packed weights, which stay, and for what some are fused of."""
        return self._unpacking_bytes(self.layers)

    @property
    def dense_unpacking_bytes(self) -> int:
        """The same where routed experts are made one by one, without what those take."""
        return self._unpacking_bytes(self.dense)

    def _unpacking_bytes(self, layers: Sequence[Binder]) -> int:
        fused = max(binder.fused_elements for binder in layers)
        return (self._unpacked_in(layers) + fused) * self.dtype.itemsize

    def activation_bytes(self, rows: int, length: int, chunk: int, device: torch.device | None = None) -> int:
        """The same without what packed weights take."""
        kept, item = self.skeleton.rows, self.dtype.itemsize
        hidden: int = self.skeleton.config.hidden_size
        inner = max((max(shape) for shape in self._matrix_shapes()), default=hidden)
        states, chunk, keys = rows * hidden * item, min(rows, chunk), length + rows
        gated = chunk * 3 * inner * item
        # Keys in 8 bits may become values before a layer looks at them.
        as_values = self.int8_cache and (kept.expanded or self.skeleton.closed)
        values = max(kept.kept) * (4 + item) if as_values else 0
        part = (
            chunk * 4 * hidden * 4
            + self._dense_scratch(rows, keys, chunk)
            + max(rows, length) * (kept.expanded * item + values)
            + chunk * item * kept.row_numbers // len(self.layers) * _WIDENED
        )
        if (device or self.device).type == "cpu":
            laid = self._laid_for_products(chunk, inner)
            attention = tree_attention_scratch(
                chunk, keys, kept.heads, kept.groups, self.dtype, self.int8_cache, size=kept.head_size
            ) + list_bytes(rows - chunk, keys)
            return 4 * states + part + gated + attention + laid
        part += max(gated, gpu_scratch_bytes(rows, length, kept.heads))  # one is gone when the other comes
        # When layers are done, the last norm runs over all rows in float32.
        return 2 * states + max(part, rows * hidden * (item + 8))

    def _laid_for_products(self, rows: int, inner: int) -> int:
        """Bytes in which a CPU lays out a matrix, or rows of up to `inner` numbers beside panels."""
        blocks, item = has_row_blocks(torch.device("cpu"), self.dtype), self.dtype.itemsize
        beside = (rows * inner * item + panel_bytes(rows)) if blocks or self.uses_panels else 0
        if blocks:
            return beside
        whole = self.layer_elements[0] - (self.layers[0].panel_elements if self.uses_panels else 0)
        return beside + min(whole, max((a * b for a, b in self._matrix_shapes()), default=0)) * item

    def _dense_scratch(self, rows: int, keys: int, chunk: int) -> int:
        """Bytes of dense masks, of scores that layers make of them, and of an index's scores and choices."""
        if not self.skeleton.masked:
            return 0
        config, heads = self.skeleton.config, self.skeleton.rows.heads
        scores = heads if self.skeleton.closed else 2 * int(getattr(config, "index_n_heads", 0))
        choices = rows * min(int(getattr(config, "index_topk", 0)), keys) * 40
        return rows * keys + chunk * keys * (8 + 12 * scores) + choices

    def _matrix_shapes(self) -> list[tuple[int, int]]:
        parameters = self.skeleton.layers[0].parameters()
        return [(p.shape[-2], p.shape[-1]) for p in parameters if p.dim() >= 2]
