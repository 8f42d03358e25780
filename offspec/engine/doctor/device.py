"""Check of the default device for models."""

from collections.abc import Iterator

from offspec.engine.doctor.finding import DoctorOptions, Finding
from offspec_planners.measure import gpu

_PART = "models are computed on"


def check(options: DoctorOptions) -> Iterator[Finding]:
    """Yield one finding: the default GPU, or the CPU and the reason for it."""
    found = gpu.usable_gpu()
    if isinstance(found, gpu.Gpu):
        device = f"cuda:{found.index}"
        yield Finding(_PART, "ok", f"the GPU {found.name} ({device})", figures={"device": device})
    elif found.remedy:
        text = f"the CPU, not a GPU: {found.found}"
        yield Finding(_PART, "limited", text, found.remedy, {"device": "cpu"})
    else:
        yield Finding(_PART, "ok", f"the CPU: {found.found}", figures={"device": "cpu"})
