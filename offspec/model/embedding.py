"""Token embeddings that stay on disk: only the rows of the tokens in a pass are ever read."""

from collections import OrderedDict
from typing import Any

import torch

from offspec.checkpoint.tensors import TensorInfo, torch_dtype
from offspec.store.arena import PAGE, Arena, round_up
from offspec.store.reader import DirectReader

_KEPT_ROWS = 2048  # rows of common tokens kept in memory; a few megabytes


class RowGather:
    """Feeds an embedding module the rows it needs, leaving its own arithmetic (scaling, say) as it is.

    Before the module runs, its weight becomes the matrix of the distinct rows [U, H] and its ids become
    indices into that.
    """

    def __init__(
        self, module: Any, info: TensorInfo, dtype: torch.dtype, device: torch.device, reader: DirectReader
    ) -> None:
        self._info, self._dtype, self._device, self._reader = info, dtype, device, reader
        self._row_bytes = info.nbytes // info.shape[0]
        self._kept: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._page = Arena(self._row_bytes + 2 * PAGE)  # a row need not begin where a page does
        module.padding_idx = None  # matters to gradients alone, and must lie within the rows that are here
        self._hook = module.register_forward_pre_hook(self._feed)

    def _feed(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        distinct, places = torch.unique(args[0], return_inverse=True)
        rows = torch.stack([self._row(token) for token in distinct.tolist()]).to(self._device, self._dtype)
        module._parameters["weight"] = torch.nn.Parameter(rows, requires_grad=False)
        return (places, *args[1:])

    def _row(self, token: int) -> torch.Tensor:
        row = self._kept.pop(token, None)
        if row is None:
            row = self._read(token)
        self._kept[token] = row
        if len(self._kept) > _KEPT_ROWS:
            self._kept.popitem(last=False)
        return row

    def _read(self, token: int) -> torch.Tensor:
        offset = self._info.offset + token * self._row_bytes
        lead = offset % PAGE
        needed = lead + self._row_bytes
        self._reader.read_into(self._info.file, offset - lead, self._page.buffer[: round_up(needed)], needed)
        return self._page.tensor[lead:needed].clone().view(torch_dtype(self._info.dtype))

    def close(self) -> None:
        self._hook.remove()
