"""Where the keys and values of all layers lie."""

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

    Each may have a shape, a dtype and strides of its own, as long as its last dimension is contiguous; they
    must not overlap. The table keeps them alive, and is of no use for memory that took their place.
    capacity: the smallest C; heads: the largest number of heads.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        if not tensors:
            raise ArgumentError("tensors", "there must be one at least")
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
        """Bytes of the largest integer of which all rows and strides are whole multiples."""
        return math.gcd(_LARGEST_WORD, *(number for view in self.views for number in _bytes(view)))

    @cached_property
    def size(self) -> int:
        """Words of the longest row."""
        return max(view.shape[2] * view.element_size() for view in self.views) // self.word

    @cached_property
    def places(self) -> Tensor:
        """[tensors, 5] int64 on the device: address, strides of heads and rows, size of a row, heads.

        Strides and size are in words.
        """
        places = [
            [address, *(number // self.word for number in sizes), view.shape[0]]
            for view in self.views
            for address, *sizes in [_bytes(view)]
        ]
        (found,) = upload([places], self.device)
        return found


def _bytes(view: Tensor) -> tuple[int, int, int, int]:
    """The address, the strides of heads and rows, and the size of a row of [heads, C, D]."""
    width = view.element_size()
    return view.data_ptr(), view.stride(0) * width, view.stride(1) * width, view.shape[2] * width
