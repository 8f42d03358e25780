"""Check of the NVIDIA driver: whether there is a GPU and whether programs can use it."""

from collections.abc import Iterator

from offspec.engine.doctor.finding import DoctorOptions, Figure, Finding
from offspec_planners.measure.gpu import cards_on_bus, driver_fault, find_driver, module_version
from offspec_planners.units import format_count

_PART = "NVIDIA driver"


def check(options: DoctorOptions) -> Iterator[Finding]:
    """Yield one finding: the driver and the number of GPUs."""
    cards, driver, module = cards_on_bus(), find_driver(), module_version()
    figures: dict[str, Figure] = {
        "cards": cards,
        "kernel_module": module,
        "cuda": driver.name if driver else None,
        "gpus": driver.gpus if driver else 0,
        "error": driver.error if driver else None,
    }
    if driver is None and not cards:
        yield Finding(_PART, "absent", "no NVIDIA GPU; models run on the CPU", figures=figures)
    elif (fault := driver_fault(driver, cards)) is not None:
        yield Finding(_PART, "failed", fault.found, fault.remedy, figures)
    elif driver is not None:
        release = f"{module}, " if module else ""
        found = f"{release}for CUDA {driver.name}; {format_count(driver.gpus, 'GPU')}"
        yield Finding(_PART, "ok", found, figures=figures)
