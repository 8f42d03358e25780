"""Arguments of every backend of tree attention."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from offspec_kernels.quantized_rows import Rows
from offspec_kernels.tree_mask import TreeExtent, TreeMask, Window


class AttentionArguments(NamedTuple):
    """Checked arguments of `tree_attention`."""

    query: Tensor
    key: Rows
    value: Rows
    tree_mask: TreeMask
    scale: float
    window: Window | None
    softcap: float | None
    sinks: Tensor | None
    out: Tensor
    chosen: Tensor | None = None
    exact: bool = True

    def trees(self) -> Iterator[tuple[int, TreeExtent]]:
        """Yield trees that have queries, zeroing the padding rows of `out`."""
        for tree, reach in enumerate(self.tree_mask.extents()):
            if reach.count < self.out.shape[2]:
                self.out[tree, :, reach.count :] = 0
            if reach.count:
                yield tree, reach
