"""Test that Triton can compile and run a kernel on a device, which needs a driver and a C compiler."""

import torch
import triton
import triton.language as tl

_COUNT = 16


@triton.jit
def _count(out, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(out + place, place)


def try_triton(device: torch.device) -> None:
    """Run a kernel; raise Triton's error, or RuntimeError if the kernel ran without effect."""
    out = torch.zeros(_COUNT, dtype=torch.int32, device=device)
    with torch.cuda.device_of(out):
        _count[(1,)](out, COUNT=_COUNT)
    if out.tolist() != list(range(_COUNT)):
        raise RuntimeError("a kernel ran and had no effect")
