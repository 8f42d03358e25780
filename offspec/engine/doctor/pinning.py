"""Check of pinned (page-locked) RAM: whether the system grants it, and the speed of copies to GPUs."""

from collections.abc import Iterator

from offspec.core import memory
from offspec.engine.doctor.finding import DoctorOptions, Finding
from offspec.engine.doctor.memory import locked_limit
from offspec_planners.units import format_bytes, format_rate

_PART = "pinned memory"
_WANTED = 1_000_000_000
_SLOW = 5_000_000_000  # bytes per second: PCIe 3.0 x8 is faster
_REFUSED = (
    "raise the limit of locked memory (ulimit -l unlimited; docker run --ulimit memlock=-1). In WSL, "
    "increase its memory in .wslconfig"
)
_LANES = "put the card in a slot with 16 lanes (nvidia-smi -q shows the link's width and generation)"


def check(options: DoctorOptions) -> Iterator[Finding]:
    """Yield one finding on pinning, then, if it is granted, one on the copies to each GPU."""
    import torch

    if not torch.cuda.is_available():
        yield Finding(_PART, "absent", "torch cannot use a GPU, so nothing is copied")
        return
    nbytes = min(_WANTED, memory.available_bytes() // 2)
    pinned = _pinned(nbytes)
    yield pinned
    for index in range(torch.cuda.device_count() if pinned.state == "ok" else 0):
        yield _copies(index)


def _pinned(nbytes: int) -> Finding:
    from offspec.stream.arena import Arena

    arena = Arena(nbytes, pin=True)
    pinned = arena.pinned
    arena.close()
    size, figures = format_bytes(arena.nbytes), {"bytes": arena.nbytes, "pinned": pinned}
    if pinned:
        return Finding(_PART, "ok", f"{size} pinned", figures=figures)
    found = f"{size} refused (ulimit -l is {locked_limit()}): copies to the GPU are slower and synchronous"
    return Finding(_PART, "failed", found, _REFUSED, figures)


def _copies(index: int) -> Finding:
    from offspec_planners.measure.processor import copy_bandwidth

    part, rate = f"RAM to GPU {index}", copy_bandwidth(f"cuda:{index}")
    figures = {"bytes_per_s": rate.value, "slowest": rate.low, "fastest": rate.high}
    if rate.value < _SLOW:
        return Finding(part, "limited", f"{format_rate(rate.value)} (slow)", _LANES, figures)
    return Finding(part, "ok", format_rate(rate.value), figures=figures)
