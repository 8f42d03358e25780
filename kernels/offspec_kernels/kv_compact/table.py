"""Addresses of the keys and values of all layers."""

import math
from collections.abc import Sequence
from functools import cached_property

from torch import Tensor

from offspec_kernels.checks import check_device, check_rows
from offspec_kernels.errors import ArgumentError
from offspec_kernels.transfer import upload

_LARGEST_WORD = 8  # bytes


class KVTable:
    """Tensors [heads, C, D] or [1, heads, C, D] on one device, to be compacted together.

    Shapes, dtypes and strides may differ, but the last dimension must be contiguous and tensors must not
    overlap. The table keeps the tensors alive; build a new table for reallocated tensors.
    capacity: the smallest C; heads: the largest number of heads.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        if not tensors:
            raise ArgumentError("tensors", "must contain at least one tensor")
        for tensor in tensors:
            if tensor.dim() != 3 and not (tensor.dim() == 4 and tensor.shape[0] == 1):
                raise ArgumentError(
                    "tensors", f"shapes must be [heads, C, D] or [1, heads, C, D], not {list(tensor.shape)}"
                )
            check_device("tensors", tensor, tensors[0].device)
            check_rows("tensors", tensor)
        self.views = tuple(tensor if tensor.dim() == 3 else tensor[0] for tensor in tensors)  # [heads, C, D]
        self.device = tensors[0].device
        self.capacity = min(view.shape[1] for view in self.views)
        self.heads = max(view.shape[0] for view in self.views)

    @cached_property
    def word(self) -> int:
        """Size in bytes of the largest integer that divides all row sizes and strides."""
        return math.gcd(_LARGEST_WORD, *(number for view in self.views for number in _bytes(view)))

    @cached_property
    def size(self) -> int:
        """Length of the longest row in words."""
        return max(view.shape[2] * view.element_size() for view in self.views) // self.word

    @cached_property
    def pointer_table(self) -> Tensor:
        """Table [tensors, 5] int64 on the device: address, strides of heads and rows, row size, heads.

        Strides and sizes are in words.
        """
        places = [
            [address, *(number // self.word for number in sizes), view.shape[0]]
            for view in self.views
            for address, *sizes in [_bytes(view)]
        ]
        (found,) = upload([places], self.device)
        return found


def _bytes(view: Tensor) -> tuple[int, int, int, int]:
    """Return the address, the strides of heads and rows, and the row size of [heads, C, D], in bytes."""
    width = view.element_size()
    return view.data_ptr(), view.stride(0) * width, view.stride(1) * width, view.shape[2] * width
