"""Where models are computed unless `--device` says otherwise."""

from collections.abc import Iterator

from offspec.engine.doctor.finding import Asked, Finding
from offspec_planners.measure import gpu

_PART = "models are computed on"


def check(asked: Asked) -> Iterator[Finding]:
    """One finding: the GPU that is taken by default, or the CPU and why."""
    found = gpu.usable_gpu()
    if isinstance(found, gpu.Gpu):
        device = f"cuda:{found.index}"
        yield Finding(_PART, "ok", f"the GPU {found.name} ({device})", figures={"device": device})
    elif found.remedy:
        told = f"the CPU, not on a GPU: {found.found}"
        yield Finding(_PART, "limited", told, found.remedy, {"device": "cpu"})
    else:
        yield Finding(_PART, "ok", f"the CPU: {found.found}", figures={"device": "cpu"})
