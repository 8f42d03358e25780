"""Memory sizes of an opened model: its weights, its cache, and a pass."""

import math
from collections.abc import Sequence
from copy import copy
from typing import Self

import torch

from offspec.checkpoint.tensors import can_slice, stored_tensors
from offspec.model.binding import Binder
from offspec.model.head import HeadBlock, head_blocks
from offspec.model.opened import OpenedModel
from offspec.model.row_independence import has_row_blocks
from offspec.stream.layout import lay_out
from offspec_kernels.row_linear.blocks import panel_bytes
from offspec_kernels.tree_attention import gpu_scratch_bytes, list_bytes
from offspec_kernels.tree_attention import scratch_bytes as tree_attention_scratch

# Sets of states of a sequence: committed, including the text of the current pass, and a temporary copy.
_STATES = 3
# Memory of a scan as a multiple of its rows' bytes: float32 values, and a copy while they are joined.
_WIDENED = 6
_WINDOW_GAPS = 256  # bytes: alignment of a layer's stores
_HEAD_VALUES = 4 << 20  # of a packed head in a streamed block, even if layers unpack fewer at once


class SizedModel(OpenedModel):
    """Opened model with the memory sizes of each part and of passes, all known before weights are read."""

    @property
    def layer_bytes(self) -> list[int]:
        """Bytes of each layer in a slot, which is also the number of bytes read for it."""
        return [binder.layout.nbytes for binder in self.layers]

    @property
    def layer_elements(self) -> list[int]:
        """Number of weights in each layer."""
        return [sum(p.numel() for p in layer.parameters()) for layer in self.skeleton.layers]

    @property
    def stored_bits(self) -> float:
        """Average stored bits per weight of the layers."""
        return 8 * sum(self.layer_bytes) / sum(self.layer_elements)

    @property
    def layer_conversion_bytes(self) -> list[int]:
        """Additional bytes of each layer for tensors that must be converted."""
        return [binder.copied_bytes for binder in self.layers]

    @property
    def dense_bytes(self) -> list[int]:
        """Bytes of each layer without its routed experts."""
        return [binder.layout.nbytes for binder in self.dense]

    @property
    def dense_conversion_bytes(self) -> list[int]:
        """Additional bytes of each layer for conversion, without its routed experts."""
        return [binder.copied_bytes for binder in self.dense]

    @property
    def unpacked_layer_bytes(self) -> list[int]:
        """Bytes of each layer fully unpacked in the model's dtype."""
        return [binder.kept_bytes for binder in self.layers]

    @property
    def unpacked_conversion_bytes(self) -> list[int]:
        """Temporary additional bytes of each layer while it is unpacked."""
        return [binder.layout.nbytes + binder.fused_elements * self.dtype.itemsize for binder in self.layers]

    @property
    def non_layer_bytes(self) -> int:
        """Bytes of all resident parts outside the layers: head, final norm, positions."""
        return sum(binder.kept_bytes for binder in self._rest)

    @property
    def embedding_bytes(self) -> int:
        """Bytes of an embedding kept in RAM instead of read by row from disk; 0 if it is tied to the head."""
        return 0 if self._rows is None else lay_out("the embedding", stored_tensors(self._rows)).nbytes

    @property
    def head_bytes(self) -> int:
        """Bytes of the head, included in `non_layer_bytes`, that may be streamed; 0 if it cannot be."""
        if self._head is None or not can_slice(self._head.sources[0][0]):
            return 0
        return self._rest[1].kept_bytes

    @property
    def head_stored_bytes(self) -> int:
        """Bytes of the head on disk, read in each pass if it is streamed."""
        if self._head is None:  # tied to the embedding
            weight: torch.Tensor = self.skeleton.model.get_output_embeddings().weight
            return weight.numel() * self.dtype.itemsize
        return self._head.sources[0][0].nbytes

    @property
    def head_block_bytes(self) -> int:
        """Bytes of the largest block of a streamed head."""
        return max((block.layout.nbytes for block in self._head_blocks()), default=0)

    def _head_blocks(self) -> list[HeadBlock]:
        if self._head is None or not self.head_bytes:
            return []
        return head_blocks(self._head.sources[0][0], max(self.layer_bytes), self._unpacked_in(self.layers))

    def _unpacked_in(self, layers: Sequence[Binder]) -> int:
        """Return the maximum number of values unpacked at once while layers or head blocks run."""
        by_panels = self.device.type == "cpu" and self.uses_panels
        most = max(binder.scratch_elements(by_panels) for binder in layers)
        if self._head is not None and self._head.is_packed:
            most = max(most, min(_HEAD_VALUES, math.prod(self._head.sources[0][0].shape)))
        return most

    def with_int8_cache(self) -> Self:
        """Return a copy with an int8 KV cache, for sizes only; it must not be loaded."""
        narrow = copy(self)
        narrow.int8_cache = True
        return narrow

    def cache_bytes(self, capacity: int, layers: Sequence[int] | None = None) -> int:
        """Return the bytes of a cache of `capacity` positions, for all layers by default."""
        each = self.position_bytes
        every = each if layers is None else [each[layer] for layer in layers if layer < len(each)]
        return capacity * sum(every)

    def layer_cache_bytes(self, capacity: int) -> int:
        """Return the cache bytes of the largest layer at `capacity` positions."""
        return capacity * max(self.position_bytes, default=0)

    def offload_buffer_bytes(self, capacity: int) -> int:
        """Return the bytes of an offload buffer for the largest layer's rows at `capacity` positions."""
        return self.layer_cache_bytes(capacity) + _WINDOW_GAPS

    @property
    def can_offload_cache(self) -> bool:
        """Whether the KV cache may be in RAM: each layer has its own, read by offspec's attention only."""
        skeleton = self.skeleton
        own = sum(numbers > 0 for numbers in skeleton.rows.kept)
        return not (skeleton.masked or skeleton.own_attention) and own == len(skeleton.rows.products)

    @property
    def position_bytes(self) -> list[int]:
        """Bytes per position in each layer of the cache."""
        kept, item = self.skeleton.rows, self.dtype.itemsize
        if not self.int8_cache:
            return [numbers * item for numbers in kept.kept]
        layers = zip(kept.kept, kept.index, kept.key_heads, strict=True)
        return [numbers + index * (item - 1) + 4 * heads for numbers, index, heads in layers]

    def state_bytes(self, rows: int, snapshots: int) -> int:
        """Return the bytes of recurrent states, including those for a tree of `rows` rows."""
        kept, item = self.skeleton.rows, self.dtype.itemsize
        text = 4 * kept.state_numbers + item * kept.tail_numbers
        return text * (_STATES + snapshots) + rows * item * kept.row_numbers

    def scratch_bytes(self, rows: int, length: int, chunk: int, device: torch.device | None = None) -> int:
        """Return the maximum workspace bytes of a pass, including unpacked weights.

        Args:
            rows: Rows of the pass.
            length: Positions of the cache.
            chunk: Rows that go through a layer together.
            device: Compute device of the layers. Default: the model's device.
        """
        return self.activation_bytes(rows, length, chunk, device) + self.unpacking_bytes

    @property
    def unpacking_bytes(self) -> int:
        """Bytes of the workspace for unpacked weights, and of temporary parts of fused weights."""
        return self._unpacking_bytes(self.layers)

    @property
    def dense_unpacking_bytes(self) -> int:
        """Bytes of the workspace for unpacked weights without routed experts, if those load on demand."""
        return self._unpacking_bytes(self.dense)

    def _unpacking_bytes(self, layers: Sequence[Binder]) -> int:
        fused = max(binder.fused_elements for binder in layers)
        return (self._unpacked_in(layers) + fused) * self.dtype.itemsize

    def activation_bytes(self, rows: int, length: int, chunk: int, device: torch.device | None = None) -> int:
        """Return the maximum activation bytes of a pass, without unpacked weights; see `scratch_bytes`."""
        kept, item = self.skeleton.rows, self.dtype.itemsize
        hidden: int = self.skeleton.config.hidden_size
        inner = max((max(shape) for shape in self._matrix_shapes()), default=hidden)
        states, chunk, keys = rows * hidden * item, min(rows, chunk), length + rows
        gated = chunk * 3 * inner * item
        # 8-bit keys may be dequantized before a layer reads them.
        as_values = self.int8_cache and (kept.expanded or self.skeleton.own_attention)
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
        part += max(gated, gpu_scratch_bytes(rows, length, kept.heads))  # never allocated together
        # After the layers, the last norm runs over all rows in float32.
        return 2 * states + max(part, rows * hidden * (item + 8))

    def _laid_for_products(self, rows: int, inner: int) -> int:
        """Return the bytes of a matrix that a CPU reorders, or of panels and rows of `inner` numbers."""
        blocks, item = has_row_blocks(torch.device("cpu"), self.dtype), self.dtype.itemsize
        beside = (rows * inner * item + panel_bytes(rows)) if blocks or self.uses_panels else 0
        if blocks:
            return beside
        whole = self.layer_elements[0] - (self.layers[0].panel_elements if self.uses_panels else 0)
        return beside + min(whole, max((a * b for a, b in self._matrix_shapes()), default=0)) * item

    def _dense_scratch(self, rows: int, keys: int, chunk: int) -> int:
        """Return the bytes of dense masks, layers' attention scores, and an index's scores and choices."""
        if not self.skeleton.masked:
            return 0
        config, heads = self.skeleton.config, self.skeleton.rows.heads
        scores = heads if self.skeleton.own_attention else 2 * int(getattr(config, "index_n_heads", 0))
        choices = rows * min(int(getattr(config, "index_topk", 0)), keys) * 40
        return rows * keys + chunk * keys * (8 + 12 * scores) + choices

    def _matrix_shapes(self) -> list[tuple[int, int]]:
        parameters = self.skeleton.layers[0].parameters()
        return [(p.shape[-2], p.shape[-1]) for p in parameters if p.dim() >= 2]
