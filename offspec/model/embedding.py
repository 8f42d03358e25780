"""Token embeddings of which only the rows of the tokens in a pass are used: from disk, or from RAM.

A target's rows are read from disk, once a pass. A draft runs many small steps while the disk is busy with
the target's layers, each of which would wait for it, so its embedding is held in RAM: its own, or the
target's where it looks tokens up in that.
"""

from collections import OrderedDict
from typing import Any

import torch

from offspec.checkpoint.tensors import TensorInfo, Weight, cut, on_disk, torch_dtype
from offspec.model.unpacking import values_of
from offspec.stream.arena import PAGE, Arena, round_up
from offspec.stream.direct_reader import DirectReader
from offspec.stream.disk_stream import read_unit
from offspec.stream.layout import lay_out

_KEPT_ROWS = 2048  # rows of common tokens kept in memory; a few megabytes


class RowGather:
    """Feeds an embedding module the rows it needs, leaving its own arithmetic (scaling, say) as it is.

    Before the module runs, its weight becomes the matrix of the distinct rows [U, H] and its ids become
    indices into that. weight [V, H]: a stored tensor, or a packed one that can be cut. held: read
    all of it now, and keep it in RAM as it is stored. Ids may come on the CPU, and it is best that they do:
    nobody waits for a device then.
    """

    def __init__(
        self,
        module: Any,
        weight: Weight,
        dtype: torch.dtype,
        device: torch.device,
        reader: DirectReader,
        *,
        held: bool = False,
    ) -> None:
        self._weight, self._dtype, self._device, self._reader = weight, dtype, device, reader
        self._kept: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._layout = lay_out("the embedding", on_disk(weight))
        self._table = read_unit(self._layout, reader) if held else None
        most = max(info.nbytes for info in on_disk(cut(weight, 0, 1)))
        self._page = Arena(most + 2 * PAGE)  # a row need not begin where a page does
        module.takes_ids_of_the_host = True
        module.padding_idx = None  # matters to gradients alone, and must lie within the rows that are here
        none = torch.empty(0, weight.shape[1], dtype=dtype, device=device)
        module._parameters["weight"] = torch.nn.Parameter(none, requires_grad=False)  # where ids are to be
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
        """The row [H] in the model's dtype, on the CPU."""
        weight = cut(self._weight, token, token + 1)
        views = {info.name: self._read_part(info) for info in on_disk(weight)}
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
