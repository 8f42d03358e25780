"""Whether Triton can compile a kernel for a device and run it, which takes a driver and a C compiler."""

import torch
import triton
import triton.language as tl

_COUNT = 16


@triton.jit
def _count(out, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(out + place, place)


def try_triton(device: torch.device) -> None:
    """Raises whatever Triton does, or a RuntimeError where a kernel runs and does nothing."""
    out = torch.zeros(_COUNT, dtype=torch.int32, device=device)
    with torch.cuda.device_of(out):
        _count[(1,)](out, COUNT=_COUNT)
    if out.tolist() != list(range(_COUNT)):
        raise RuntimeError("a kernel ran and had no effect")
