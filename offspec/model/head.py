"""Streamed output head: the matrix from hidden states to logits, in blocks of rows after the last layer.

The head of a large vocabulary is as large as a layer or two. If it does not fit in device memory, its blocks
are the last units of a pass, and the logits of all nodes are computed while the blocks are streamed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from offspec.checkpoint.tensors import PackedInfo, Weight, slice_rows, stored_tensors
from offspec.model.unpacking import weight_in
from offspec.sampling.row_logprobs import RowLogprobs
from offspec.stream.layout import UnitLayout, lay_out


@dataclass(frozen=True, slots=True)
class HeadBlock:
    """Rows [start, end) of the head, with their layout on disk and in a slot."""

    start: int
    end: int
    weight: Weight
    layout: UnitLayout


def head_blocks(weight: Weight, most: int, values: int) -> list[HeadBlock]:
    """Split the head [V, H] into blocks of about `most` bytes, with at most `values` values if packed."""
    vocabulary, width = weight.shape
    step = max(1, most // (weight.nbytes // vocabulary))
    if isinstance(weight, PackedInfo):
        step = max(1, min(step, values // width))
    blocks: list[HeadBlock] = []
    for start in range(0, vocabulary, step):
        end = min(start + step, vocabulary)
        part = slice_rows(weight, start, end)
        blocks.append(HeadBlock(start, end, part, lay_out(f"head {len(blocks)}", stored_tensors(part))))
    return blocks


class StreamedHead:
    """Computes logits block by block.

    Args:
        module: Output head of the model; its own weight stays on the meta device.
        blocks: Blocks of the head.
        dtype: Dtype of the model.
        device: Device of the head.
        memory_of: memory_of(j) is a context manager that provides the slot [bytes] with block j.
        empty: empty(n) returns memory for n values of a packed block, valid until the next call.
    """

    def __init__(
        self,
        module: Any,
        blocks: list[HeadBlock],
        dtype: torch.dtype,
        device: torch.device,
        memory_of: Callable[[int], Any],
        empty: Callable[[int], torch.Tensor],
    ) -> None:
        self._module, self._blocks = module, blocks
        self._dtype, self._device = dtype, device
        self._memory_of, self._empty = memory_of, empty
        self._known: set[Weight] = set()  # packed blocks checked to have finite values

    def logits(
        self,
        hidden: torch.Tensor,
        project: Callable[[torch.Tensor], torch.Tensor],
        scored: Sequence[RowLogprobs] = (),
    ) -> torch.Tensor:
        """Return the logits [n, V] of hidden states [n, H].

        Args:
            hidden: [n, H], hidden states after the final norm.
            project: project(hidden) runs the model's own head over the bound rows.
            scored: Log-probability requests that also use each block while it is in memory.
        """
        whole: torch.Tensor | None = None
        for index, block in enumerate(self._blocks):
            with self._memory_of(index) as memory, self._bound(block, memory):
                part = project(hidden)
                if whole is None:
                    whole = part.new_empty(len(hidden), self._blocks[-1].end)
                whole[:, block.start : block.end] = part
                del part
                for rows in scored:
                    rows.add(project, block.start)
        assert whole is not None
        return whole

    @contextmanager
    def _bound(self, block: HeadBlock, memory: torch.Tensor) -> Iterator[None]:
        parameters = self._module._parameters
        kept = dict(parameters)
        rows = weight_in(memory, block.layout, block.weight, self._empty, self._known)
        rows = rows.to(self._device, self._dtype)
        parameters["weight"] = torch.nn.Parameter(rows, requires_grad=False)
        if kept.get("bias") is not None:
            bias = kept["bias"][block.start : block.end]
            parameters["bias"] = torch.nn.Parameter(bias, requires_grad=False)
        try:
            yield
        finally:
            parameters.update(kept)
