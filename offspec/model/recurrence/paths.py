"""Order of the rows in a part of a pass, for recurrent layers.

Letters: T rows of the part, R rows that they may depend on, K taps of a convolution.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from offspec.model.attention import TreeContext
from offspec_kernels.tree_scan import TraversalOrder, traversal_order


@dataclass(frozen=True, slots=True)
class PartPaths:
    """Predecessors of the rows of one part: a piece of the text before the tree, or rows of the tree.

    Args:
        is_text: Whether the rows are consecutive text, which is committed whatever part of the tree is
            accepted.
        first: Index of this part's first row among the R rows of the tree so far; 0 for text.
        parent: [R] predecessor of each row; -1: the last row of the text.
        order: Traversal to the part's rows, including the steps of their ancestors.
        windows: Results of `window`, cached for later layers.
    """

    is_text: bool
    first: int
    parent: NDArray[np.int64]
    order: TraversalOrder
    windows: dict[tuple[int, torch.device], torch.Tensor] = field(default_factory=dict)

    def window(self, taps: int, device: torch.device) -> torch.Tensor:
        """Return [T, K], the inputs of each row of the part, with K - 1 text rows before the R tree rows."""
        if (taps, device) not in self.windows:
            self.windows[taps, device] = torch.from_numpy(self._window(taps)).to(device)
        return self.windows[taps, device]

    def _window(self, taps: int) -> NDArray[np.int64]:
        window = np.empty((len(self.parent) - self.first, taps), np.int64)
        at = np.arange(self.first, len(self.parent))
        for tap in range(taps - 1, -1, -1):
            window[:, tap] = at + taps - 1
            at = np.where(at >= 0, self.parent[np.maximum(at, 0)], at - 1)
        return window


def part_paths(context: TreeContext, start: int, end: int) -> PartPaths:
    """Return the paths of rows `start` to `end` after the committed rows, cached in `context`."""
    key = ("paths", start, end)
    if key not in context.kept:
        context.kept[key] = _found(context, start, end)
    paths: PartPaths = context.kept[key]
    return paths


def _found(context: TreeContext, start: int, end: int) -> PartPaths:
    if end <= context.causal:
        parent = np.arange(end - start) - 1
        return PartPaths(True, 0, parent, traversal_order(parent.tolist()))
    assert start >= context.causal, "a part has rows of the text or of the tree"
    first, rows = start - context.causal, end - context.causal
    sees = context.ancestors[:rows, :rows].cpu().numpy()
    before = np.tril(sees, -1)
    parent = (before * np.arange(1, rows + 1)).max(axis=1, initial=0) - 1
    needed = np.flatnonzero(sees[first:].any(axis=0))
    place = np.full(rows + 1, -1)  # the last entry stands for no parent
    place[needed] = np.arange(len(needed))
    order = traversal_order(place[parent[needed]].tolist())
    return PartPaths(False, first, parent, order.remap_rows(needed))
