"""The recurrence as it is written, in float64: a state for every row."""

import torch
from torch import Tensor

from offspec_kernels.tree_scan.order import WalkOrder


def tree_scan(
    query: Tensor | None, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None,
    rates: Tensor | None, state: Tensor, order: WalkOrder, out: Tensor | None, final: Tensor | None,
) -> None:  # fmt: skip
    """See the package."""
    group = value.shape[1] // key.shape[1]
    places = dict[int, Tensor]({0: state.double()})
    for row, source, target in zip(*map(list, (order.row, order.source, order.target)), strict=True):
        k = key[row].double().repeat_interleave(group, 0)
        log = decay[row].double()
        log = log.view(len(log), -1, 1) if rates is None else rates.double() * log[:, None, :]
        now = places[source] * log.exp()
        v = value[row].double()
        if beta is not None:
            v = beta[row].double()[:, None] * (v - torch.einsum("hde,hd->he", now, k))
        now = now + k[:, :, None] * v[:, None, :]
        places[target] = now
        if query is not None and out is not None:
            q = query[row].double().repeat_interleave(group, 0)
            out[row] = torch.einsum("hde,hd->he", now, q)
    if final is not None:
        final.copy_(places[order.target[-1]] if len(order.target) else state)
