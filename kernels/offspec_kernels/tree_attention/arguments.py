"""Arguments of every path of tree attention."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from offspec_kernels.quantised_rows import Rows
from offspec_kernels.tree_mask import TreeExtent, TreeMask, Window


class Arguments(NamedTuple):
    """Those of `tree_attention`, checked."""

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
        """Those with queries. Rows of `out` that are padding become zeros on the way."""
        for tree, reach in enumerate(self.tree_mask.reaches()):
            if reach.count < self.out.shape[2]:
                self.out[tree, :, reach.count :] = 0
            if reach.count:
                yield tree, reach
