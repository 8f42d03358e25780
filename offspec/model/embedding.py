"""Token embeddings that stay on disk: only the rows of the tokens in a pass are ever read."""

import os
from collections import OrderedDict
from typing import Any

import torch

from offspec.checkpoint.tensors import TensorInfo, torch_dtype
from offspec.errors import StreamError

_KEPT_ROWS = 2048  # rows of common tokens kept in memory; a few megabytes


class RowGather:
    """Feeds an embedding module the rows it needs, leaving its own arithmetic (scaling, say) as it is.

    Before the module runs, its weight becomes the matrix of the distinct rows [U, H] and its ids become
    indices into that.
    """

    def __init__(self, module: Any, info: TensorInfo, dtype: torch.dtype, device: torch.device) -> None:
        self._info, self._dtype, self._device = info, dtype, device
        self._row_bytes = info.nbytes // info.shape[0]
        self._kept: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._file = os.open(info.file, os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_RANDOM)
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
        data = bytearray(self._row_bytes)
        try:
            count = os.preadv(self._file, [data], offset)
        except OSError as error:
            raise StreamError(
                f"read failed: {error.strerror}", file=self._info.file, offset=offset
            ) from error
        if count != self._row_bytes:
            raise StreamError("the file ended early", file=self._info.file, offset=offset)
        return torch.frombuffer(data, dtype=torch_dtype(self._info.dtype))

    def close(self) -> None:
        if self._file >= 0:
            self._hook.remove()
            os.close(self._file)
            self._file = -1
