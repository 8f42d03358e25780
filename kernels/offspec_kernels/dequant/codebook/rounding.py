"""Rounding weights to a table's values."""

import torch
from torch import Tensor

from offspec_kernels.checks import FLOATS, check_dtype
from offspec_kernels.dequant.codebook.tables import BLOCKS, TABLES, table_of
from offspec_kernels.errors import ArgumentError

_AT_ONCE = 1 << 18  # values; they stay in a processor's cache


def quantise(weight: Tensor, kind: str, block: int = 64) -> dict[str, Tensor]:
    """The parts of a weight of any shape in the format `Codebook(kind, block, torch.float16)`, but the table.

    codes uint8 [n / 2], absmax float16 [n / block], on the weight's device. A block's largest size is rounded
    to float16 first; each code then is the one whose value, with that size, is nearest to the weight.

    Scratch: some 5 MB, and a copy of the weight where it is not contiguous. Raises ArgumentError where the
    weight does not make whole blocks, or has a value that is not finite or that float16 has no room for.
    """
    if kind not in TABLES:
        raise ArgumentError("kind", f"must be one of {tuple(TABLES)}, not {kind!r}")
    if block not in BLOCKS:
        raise ArgumentError("block", f"must be one of {BLOCKS}, not {block}")
    check_dtype("weight", weight, FLOATS)
    if weight.numel() % block:
        raise ArgumentError("weight", f"{weight.numel()} values do not make whole blocks of {block}")
    blocks = weight.reshape(-1, block)
    codes = torch.empty(weight.numel() // 2, dtype=torch.uint8, device=weight.device)
    absmax = torch.empty(len(blocks), dtype=torch.float16, device=weight.device)
    borders, order = _borders(kind, weight.device)
    some = _AT_ONCE // block
    for start in range(0, len(blocks), some):
        values = blocks[start : start + some].float().contiguous()
        sizes = absmax[start : start + some]
        sizes.copy_(values.abs().amax(1))
        scale = sizes.float()[:, None]
        code = _codes(torch.where(scale > 0, values / scale, 0.0).view(-1), borders, order)
        made = codes[start * block // 2 :][: len(code) // 2]
        torch.bitwise_or(code[::2] << 4, code[1::2], out=made)
    if not absmax.isfinite().all():
        raise ArgumentError("weight", "all values must be finite and below 65,520 in size")
    return {"codes": codes, "absmax": absmax}


def _codes(values: Tensor, borders: list[float], order: Tensor) -> Tensor:
    """uint8 [n]. How many borders lie below says it ten times sooner than a search does."""
    rank = torch.zeros_like(values, dtype=torch.uint8)
    for border in borders:
        rank += values > border
    return order[rank.int()]


def _borders(kind: str, device: torch.device) -> tuple[list[float], Tensor]:
    """What lies half-way between a table's k different values, k - 1 of them, and their codes, uint8 [k]."""
    table = table_of(kind, torch.device("cpu"))
    values, where = table.unique(return_inverse=True)  # sorted; FP4 has 0 twice
    order = torch.empty(len(values), dtype=torch.uint8)
    for code in range(15, -1, -1):  # of two, the lower
        order[where[code]] = code
    return ((values[1:] + values[:-1]) / 2).tolist(), order.to(device)
