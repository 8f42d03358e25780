"""Values of codes, as multiples of a block's scale, and quantization of weights to them."""

import torch
from torch import Tensor

from offspec_kernels.checks import FLOATS, check_dtype
from offspec_kernels.errors import ArgumentError

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # weights per block, as in bitsandbytes
_AT_ONCE = 1 << 18  # values quantized at a time; they stay in the CPU's cache

# As printed in QLoRA: means of equally likely parts of a normal distribution, with 0 and both ends.
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
# A sign and three bits: floats up to 12, divided by 12, not in order.
_FP4_SIZES = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12)

TABLES = {"nf4": _NF4, "fp4": (*_FP4_SIZES, 0.0, *(-size for size in _FP4_SIZES[1:]))}


def table_of(kind: str, device: torch.device) -> Tensor:
    """Return the table of a kind, float32 [16]."""
    return torch.tensor(TABLES[kind], device=device)


def quantize(weight: Tensor, kind: str, block: int = 64) -> dict[str, Tensor]:
    """Return the parts of a weight of any shape in `Codebook(kind, block, torch.float16)`, without the table.

    codes uint8 [n / 2], absmax float16 [n / block], on the weight's device. A block's largest magnitude is
    rounded to float16 first; each code is then the one whose value, with that scale, is nearest to the
    weight.

    Workspace: about 5 MB, and a copy of the weight if it is not contiguous. Raises ArgumentError if the
    weight does not consist of whole blocks, or has a value that is not finite or out of float16's range.
    """
    if kind not in TABLES:
        raise ArgumentError("kind", f"must be one of {tuple(TABLES)}, not {kind!r}")
    if block not in BLOCKS:
        raise ArgumentError("block", f"must be one of {BLOCKS}, not {block}")
    check_dtype("weight", weight, FLOATS)
    if weight.numel() % block:
        raise ArgumentError("weight", f"{weight.numel()} values are not a multiple of the block size {block}")
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
        raise ArgumentError("weight", "all values must be finite and below 65,520 in magnitude")
    return {"codes": codes, "absmax": absmax}


def _codes(values: Tensor, borders: list[float], order: Tensor) -> Tensor:
    """Return codes uint8 [n]. Counting the borders below a value is ten times faster than a search."""
    rank = torch.zeros_like(values, dtype=torch.uint8)
    for border in borders:
        rank += values > border
    return order[rank.int()]


def _borders(kind: str, device: torch.device) -> tuple[list[float], Tensor]:
    """Return the k - 1 midpoints between a table's k different values, and the values' codes, uint8 [k]."""
    table = table_of(kind, torch.device("cpu"))
    values, where = table.unique(return_inverse=True)  # sorted; FP4 has 0 twice
    order = torch.empty(len(values), dtype=torch.uint8)
    for code in range(15, -1, -1):  # of two equal values, use the lower code
        order[where[code]] = code
    return ((values[1:] + values[:-1]) / 2).tolist(), order.to(device)
