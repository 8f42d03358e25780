"""Token embedding that reads only the rows of a pass's tokens, from disk or from RAM.

A target's rows are read from disk once per pass. A draft runs many small steps while the disk is busy with
the target's layers, and each step would have to wait for it. So the draft's embedding stays in RAM: its own,
or the target's if it uses that.
"""

from collections import OrderedDict
from typing import Any

import torch

from offspec.checkpoint.tensors import TensorInfo, Weight, slice_rows, stored_tensors, torch_dtype
from offspec.model.unpacking import values_of
from offspec.stream.arena import PAGE, Arena, round_up
from offspec.stream.direct_reader import DirectReader
from offspec.stream.disk_stream import read_unit
from offspec.stream.layout import lay_out

_KEPT_ROWS = 2048  # rows of common tokens kept in memory; a few megabytes


class StreamedEmbedding:
    """Supplies an embedding module with the rows it needs, leaving the module's own arithmetic unchanged.

    Before the module runs, its weight becomes the matrix of the distinct rows [U, H], and the ids become
    indices into that matrix. Ids are best passed on the CPU, because copying them from a device would block.

    Args:
        module: Embedding module of the model.
        weight: [V, H], a stored tensor, or a packed one that can be sliced by rows.
        dtype: Dtype of the model.
        device: Device of the module.
        reader: Reader of the weight's file.
        in_ram: Whether to read the whole weight now and keep it in RAM in its stored format.
    """

    def __init__(
        self,
        module: Any,
        weight: Weight,
        dtype: torch.dtype,
        device: torch.device,
        reader: DirectReader,
        *,
        in_ram: bool = False,
    ) -> None:
        self._weight, self._dtype, self._device, self._reader = weight, dtype, device, reader
        self._kept: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._layout = lay_out("the embedding", stored_tensors(weight))
        self._table = read_unit(self._layout, reader) if in_ram else None
        most = max(info.nbytes for info in stored_tensors(slice_rows(weight, 0, 1)))
        self._page = Arena(most + 2 * PAGE)  # a row need not start at a page boundary
        module.accepts_cpu_ids = True
        module.padding_idx = None  # affects only gradients, and would have to be a valid row index
        none = torch.empty(0, weight.shape[1], dtype=dtype, device=device)
        # The ids' device is derived from the weight's.
        module._parameters["weight"] = torch.nn.Parameter(none, requires_grad=False)
        self._hook = module.register_forward_pre_hook(self._feed)

    def _feed(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        distinct, places = torch.unique(args[0].cpu(), return_inverse=True)
        rows = torch.stack([self._row(token) for token in distinct.tolist()])
        there = rows.to(self._device, non_blocking=True)
        module._parameters["weight"] = torch.nn.Parameter(there, requires_grad=False)
        return (places.to(self._device, non_blocking=True), *args[1:])

    def _row(self, token: int) -> torch.Tensor:
        row = self._kept.pop(token, None)
        if row is None:
            row = self._read(token)
        self._kept[token] = row
        if len(self._kept) > _KEPT_ROWS:
            self._kept.popitem(last=False)
        return row

    def _read(self, token: int) -> torch.Tensor:
        """Read a row [H], in the model's dtype, on the CPU."""
        weight = slice_rows(self._weight, token, token + 1)
        views = {info.name: self._read_part(info) for info in stored_tensors(weight)}
        values = values_of(weight, views, lambda count: torch.empty(count, dtype=self._dtype), set())
        return values[0].to(self._dtype)

    def _read_part(self, info: TensorInfo) -> torch.Tensor:
        if self._table is not None:
            place, whole = self._layout.places[info.name]
            start = place + info.offset - whole.offset
            raw = self._table.tensor[start : start + info.nbytes]
            return raw.clone().view(torch_dtype(info.dtype)).view(info.shape)
        lead = info.offset % PAGE
        needed = lead + info.nbytes
        self._reader.read_into(info.file, info.offset - lead, self._page.buffer[: round_up(needed)], needed)
        return self._page.tensor[lead:needed].clone().view(torch_dtype(info.dtype)).view(info.shape)

    def close(self) -> None:
        self._hook.remove()
        self._table = None
