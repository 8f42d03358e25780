"""Some rows of a matrix in the parts of a format."""

import torch

from offspec.core.config import PackFormat
from offspec.model.quantize.rounding import round_matrix
from offspec_kernels.dequant.codebook import quantise
from offspec_kernels.dequant.grouped import GROUP
from offspec_kernels.errors import ArgumentError

_STEPS = 255  # between the least and the largest of 256 codes
_LEAST_STEP = 2.0**-24  # the smallest float16 above 0
_AT_ONCE = 1 << 17  # weights of each thread; their float32 scratch stays in its cache


def rounded(rows: torch.Tensor, to: PackFormat) -> dict[str, torch.Tensor]:
    """The parts of rows [n, columns], any float dtype, columns whole groups.

    Parts of consecutive rows, one behind the other, are those of all rows. Raises ArgumentError for weights
    that scales in float16 have no room for.
    """
    least, most = rows.aminmax()
    if max(-float(least), float(most)) > torch.finfo(torch.float16).max:
        raise ArgumentError("weight", "all values must be below 65,520 in size")
    if to == "nf4":
        return quantise(rows, "nf4", GROUP)
    some = max(1, _AT_ONCE * torch.get_num_threads() // rows.shape[1])
    made = [_even_bytes(few) if to == "int8" else round_matrix(few, 4).parts for few in rows.split(some)]
    return {name: torch.cat([parts[name] for parts in made]) for name in made[0]}


def _even_bytes(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """256 even steps from the least weight of each group to its largest: 8 bits need no finer fitting."""
    groups = rows.float().view(-1, GROUP)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    step = ((high - low) / _STEPS).clamp_min_(_LEAST_STEP).half()
    offset = low.half()
    codes = ((groups - offset.float()) / step.float()).round_().clamp_(0, _STEPS).to(torch.uint8)
    scales = (len(rows), rows.shape[1] // GROUP)
    return {"codes": codes.view(rows.shape), "step": step.view(scales), "offset": offset.view(scales)}
