"""The values that codes stand for, as multiples of a block's size."""

import torch
from torch import Tensor

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # weights of a block, as bitsandbytes has them

# As QLoRA prints them: some means of equally likely parts of a normal distribution, with 0 and both ends.
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
# A sign and three bits: floats as large as 12, over 12, and not in order.
_FP4_SIZES = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12)

TABLES = {"nf4": _NF4, "fp4": (*_FP4_SIZES, 0.0, *(-size for size in _FP4_SIZES[1:]))}


def table_of(kind: str, device: torch.device) -> Tensor:
    """float32 [16]."""
    return torch.tensor(TABLES[kind], device=device)
