"""How the rows of a part of a pass follow each other, for layers that carry a state along them.

Letters: T rows of the part, R rows that they may depend on, K taps of a convolution.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from offspec.model.attention import TreeContext
from offspec_kernels.tree_scan import WalkOrder, walk_order


@dataclass(frozen=True, slots=True)
class PartPaths:
    """Of one part: a piece of the plain text in front, or rows of a tree.

    Args:
        is_text: Whether the rows follow each other, and are committed whatever becomes of the tree.
        first: Of the R rows of the tree so far, the first of this part; 0 for text.
        parent: [R] the row before each; -1: the last of the text.
        order: The steps to the part's rows, those of their ancestors among them.
        windows: What `window` found, for the next layer.
    """

    is_text: bool
    first: int
    parent: NDArray[np.int64]
    order: WalkOrder
    windows: dict[tuple[int, torch.device], torch.Tensor] = field(default_factory=dict)

    def window(self, taps: int, device: torch.device) -> torch.Tensor:
        """[T, K]: which inputs each row of the part takes, where K - 1 of the text come before the R rows."""
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
    """Of rows start to end, counted behind the committed ones; kept in `context` for the next layer."""
    key = ("paths", start, end)
    if key not in context.kept:
        context.kept[key] = _found(context, start, end)
    paths: PartPaths = context.kept[key]
    return paths


def _found(context: TreeContext, start: int, end: int) -> PartPaths:
    if end <= context.causal:
        parent = np.arange(end - start) - 1
        return PartPaths(True, 0, parent, walk_order(parent.tolist()))
    assert start >= context.causal, "a part has rows of the text or of the tree"
    first, rows = start - context.causal, end - context.causal
    sees = context.ancestors[:rows, :rows].cpu().numpy()
    before = np.tril(sees, -1)
    parent = (before * np.arange(1, rows + 1)).max(axis=1, initial=0) - 1
    needed = np.flatnonzero(sees[first:].any(axis=0))
    place = np.full(rows + 1, -1)  # the last: of no parent
    place[needed] = np.arange(len(needed))
    order = walk_order(place[parent[needed]].tolist())
    return PartPaths(False, first, parent, order.renamed(needed))
