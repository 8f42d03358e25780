"""Attention of the few rows of several sequences in one product.

With eight trees and four rows of each, a call for each of them takes three times what one for all does, keys
copied side by side and all.

Letters: B sequences, n rows of a sequence at most, S keys at most; T, Q, KV, D as in `forward`.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from offspec.model.fused.cache import LeanRows
from offspec.model.fused.shape import PlainShape
from offspec_kernels.backend import choose_backend

_ROWS = 64  # of a sequence: of more, a call of their own is no matter
_KEYS_BYTES = 4 << 20  # of the copies of one layer


class JoinedAttention:
    """For all layers of one pass. rows: of its sequences; see `pays`."""

    def __init__(self, rows: Sequence[LeanRows], shape: PlainShape) -> None:
        self._rows, self._shape = rows, shape
        counts = [some.which.stop - some.which.start for some in rows]
        most, keys = max(counts), max(some.end for some in rows)
        first = rows[0].cache.layers[0]
        self._seen = first.new_zeros(len(rows), len(first), keys, first.shape[2])
        place, every = torch.arange(most), torch.tensor(counts)[:, None]
        first_rows = torch.tensor([some.which.start for some in rows])[:, None]
        self._asked = first_rows + torch.minimum(place, every - 1)  # behind the last row copies of it
        self._true = (place < every).flatten().nonzero()[:, 0]
        self._hidden = dict[int | None, torch.Tensor]()  # [B, 1, G n, S], what is added to scores, by window

    @staticmethod
    def pays(rows: Sequence[LeanRows], shape: PlainShape, device: torch.device) -> bool:
        """Whether the rows of these sequences are better asked together."""
        if len(rows) == 1 or device.type != "cpu" or choose_backend(device) != "eager":
            return False
        first, keys = rows[0].cache.layers[0], max(some.end for some in rows)
        copied = len(rows) * len(first) * keys * first.shape[2] * first.itemsize
        few = all(some.which.stop - some.which.start <= _ROWS for some in rows)
        return few and copied <= _KEYS_BYTES and not shape.score_cap

    def of(self, index: int, heads: torch.Tensor) -> torch.Tensor:
        """Heads [T, Q + 2 KV, D] of a layer, whose keys and values are in the caches, to [T, Q D]."""
        shape, (batch, most) = self._shape, self._asked.shape
        for place, some in enumerate(self._rows):
            self._seen[place, :, : some.end] = some.cache.layers[index][:, : some.end]
        asked = heads[:, : shape.heads][self._asked]  # [B, n, Q, D]
        pairs, groups = shape.kv_heads, shape.groups
        asked = asked.view(batch, most, pairs, groups, -1).permute(0, 2, 3, 1, 4)
        found = F.scaled_dot_product_attention(
            asked.reshape(batch, pairs, groups * most, -1),
            self._seen[:, :pairs],
            self._seen[:, pairs:],
            attn_mask=self._mask(shape.windows[index]),
            scale=shape.scale,
        )
        found = found.view(batch, pairs, groups, most, -1).permute(0, 3, 1, 2, 4)
        return found.reshape(batch * most, -1)[self._true]

    def _mask(self, window: int | None) -> torch.Tensor:
        if window not in self._hidden:
            (batch, most), keys = self._asked.shape, self._seen.shape[2]
            mask = self._seen.new_full((batch, most, keys), float("-inf"))
            mask[:, :, 0] = 0.0  # copies of a row, which nobody asks for, see something
            for own, some in zip(mask, self._rows, strict=True):
                count = some.which.stop - some.which.start
                sees = some.tree_mask.visible(0, (0, count), (0, some.end), window)
                own[:count, : some.end] = torch.where(sees, 0.0, float("-inf"))
            self._hidden[window] = mask.repeat(1, self._shape.groups, 1)[:, None]
        return self._hidden[window]
