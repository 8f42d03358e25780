"""Check of RAM and of this process's memory limits."""

import os
import resource
from collections.abc import Iterator

from offspec.core import memory
from offspec.engine.doctor.finding import DoctorOptions, Figure, Finding, State
from offspec_planners.measure.gpu import cards_on_bus
from offspec_planners.units import format_bytes

_TIGHT = 2_000_000_000  # free bytes below which a warning is shown


def check(options: DoctorOptions) -> Iterator[Finding]:
    """Yield a finding for RAM, then for limits of addresses and data (ulimit -v, -d) if they are set."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free, group = memory.available_bytes(), memory.cgroup_limit()
    figures: dict[str, Figure] = {"total": total, "available": free, "cgroup_limit": group}
    figures |= {name: _limit(which) for name, which in _LIMITS.items()}
    found = f"{format_bytes(total)} of RAM, {format_bytes(free)} free"
    if group is not None and group < total:
        found += f"; the control group allows {format_bytes(group)}"
    if free < _TIGHT:
        remedy = "close other programs, or raise the limit of the container or service"
        yield Finding("memory", "limited", found, remedy, figures)
    else:
        yield Finding("memory", "ok", found, figures=figures)
    yield from _address_limits(total)


_LIMITS = {
    "address_space": resource.RLIMIT_AS,
    "data": resource.RLIMIT_DATA,
    "locked": resource.RLIMIT_MEMLOCK,
    "open_files": resource.RLIMIT_NOFILE,
}


def _limit(which: int) -> int | None:
    """Return a resource limit of this process in bytes, or None if it is unlimited."""
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def locked_limit() -> str:
    """Return the limit of locked memory (`ulimit -l`) for display."""
    limit = _limit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if limit is None else format_bytes(limit)


def _address_limits(total: int) -> Iterator[Finding]:
    for name, option, which in (
        ("addresses", "-v", resource.RLIMIT_AS),
        ("data", "-d", resource.RLIMIT_DATA),
    ):
        limit = _limit(which)
        if limit is None:
            continue
        found = f"the shell limits {name} to {format_bytes(limit)} (ulimit {option})"
        remedy = f"ulimit {option} unlimited; to limit memory, use --memory"
        # CUDA reserves address space for RAM and VRAM together.
        fails = name == "addresses" and limit < total and cards_on_bus() > 0
        state: State = "failed" if fails else "limited"
        yield Finding(f"limit of {name}", state, found, remedy, {"limit": limit})
