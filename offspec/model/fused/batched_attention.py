"""Batched attention for a few rows of several sequences.

With eight trees of four rows each, one call per tree takes three times as long as a single call for all,
including the copies of the keys to one tensor.

Letters: B sequences, n maximum rows of a sequence, S maximum keys; T, Q, KV, D as in `fused.model`.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from offspec.model.fused.cache import FusedRows
from offspec.model.fused.shape import DecoderShape
from offspec_kernels.backend import choose_backend

_ROWS = 64  # maximum rows of a sequence; with more, separate calls cost relatively little
_KEYS_BYTES = 4 << 20  # of the copies of one layer


class BatchedAttention:
    """Batched attention for all layers of one pass; see `is_faster`.

    Args:
        rows: Rows of each sequence.
        shape: Shape of the model.
    """

    def __init__(self, rows: Sequence[FusedRows], shape: DecoderShape) -> None:
        self._rows, self._shape = rows, shape
        counts = [some.which.stop - some.which.start for some in rows]
        most, keys = max(counts), max(some.end for some in rows)
        first = rows[0].cache.layers[0]
        self._seen = first.new_zeros(len(rows), len(first), keys, first.shape[2])
        place, every = torch.arange(most), torch.tensor(counts)[:, None]
        first_rows = torch.tensor([some.which.start for some in rows])[:, None]
        self._queries = first_rows + torch.minimum(place, every - 1)  # padded with copies of the last row
        self._true = (place < every).flatten().nonzero()[:, 0]
        self._hidden = dict[int | None, torch.Tensor]()  # [B, 1, G n, S], added to the scores, by window

    @staticmethod
    def is_faster(rows: Sequence[FusedRows], shape: DecoderShape, device: torch.device) -> bool:
        """Return whether one call for the rows of all sequences is faster than one call each."""
        if len(rows) == 1 or device.type != "cpu" or choose_backend(device) != "eager":
            return False
        first, keys = rows[0].cache.layers[0], max(some.end for some in rows)
        copied = len(rows) * len(first) * keys * first.shape[2] * first.itemsize
        few = all(some.which.stop - some.which.start <= _ROWS for some in rows)
        return few and copied <= _KEYS_BYTES and not shape.attn_softcap

    def attend(self, index: int, heads: torch.Tensor) -> torch.Tensor:
        """Attend with heads [T, Q + 2 KV, D] whose keys and values are in the caches; return [T, Q D]."""
        shape, (batch, most) = self._shape, self._queries.shape
        for place, some in enumerate(self._rows):
            self._seen[place, :, : some.end] = some.cache.layers[index][:, : some.end]
        queries = heads[:, : shape.heads][self._queries]  # [B, n, Q, D]
        pairs, groups = shape.kv_heads, shape.groups
        queries = queries.view(batch, most, pairs, groups, -1).permute(0, 2, 3, 1, 4)
        found = F.scaled_dot_product_attention(
            queries.reshape(batch, pairs, groups * most, -1),
            self._seen[:, :pairs],
            self._seen[:, pairs:],
            attn_mask=self._mask(shape.windows[index]),
            scale=shape.scale,
        )
        found = found.view(batch, pairs, groups, most, -1).permute(0, 3, 1, 2, 4)
        return found.reshape(batch * most, -1)[self._true]

    def _mask(self, window: int | None) -> torch.Tensor:
        if window not in self._hidden:
            (batch, most), keys = self._queries.shape, self._seen.shape[2]
            mask = self._seen.new_full((batch, most, keys), float("-inf"))
            mask[:, :, 0] = 0.0  # padding rows must see at least one key
            for own, some in zip(mask, self._rows, strict=True):
                count = some.which.stop - some.which.start
                sees = some.tree_mask.visible(0, (0, count), (0, some.end), window)
                own[:count, : some.end] = torch.where(sees, 0.0, float("-inf"))
            self._hidden[window] = mask.repeat(1, self._shape.groups, 1)[:, None]
        return self._hidden[window]
