"""Choice of the devices: the named ones, else a usable GPU, else the CPU."""

import os
from dataclasses import replace

import torch

from offspec.core.config import AUTO, EngineConfig
from offspec.core.errors import PlanError, RequestError
from offspec.core.events import Notice, ignore_event
from offspec.draft.open import Notify
from offspec.model import devices
from offspec_planners.measure import gpu
from offspec_planners.plan import Plan
from offspec_planners.units import format_bytes

AS_GIVEN = ", as set by `device`"  # the reason in the notice if the configuration names devices


def choose_device(
    config: EngineConfig, notify: Notify = ignore_event, plan: Plan | None = None
) -> EngineConfig:
    """Return the configuration with `device` resolved to "cpu" or to names with an index.

    Args:
        config: Memory limits and settings.
        notify: Takes a Notice with the device and the reason for it.
        plan: The plan to follow, whose device is taken if `config` has "auto".

    Raises:
        PlanError: The plan is for another device.
        RequestError: The device does not exist, a setting requires a GPU and there is none, or a memory limit
            is above the machine's memory.
    """
    asked = devices.resolve_devices("all") if config.device == "all" else _with_index(config.device)
    if plan is not None and asked not in (AUTO, _with_index(plan.device)):
        raise PlanError(f"the plan has device {plan.device}, not {asked}: leave out `device`, or the plan")
    if asked != AUTO:
        names, why = asked, AS_GIVEN
    elif plan is not None:
        names, why = plan.device, ", as set by the plan"
    elif isinstance(found := gpu.usable_gpu(), gpu.Gpu):
        names, count = f"cuda:{found.index}", torch.cuda.device_count()
        why = "" if count < 2 else f', one of {count} GPUs; `device="all"` takes all of them'
    else:
        names, why = "cpu", f": no usable GPU ({found})" if found.remedy else f": {found}"
    chosen = devices.find_devices(names)
    if chosen[0].type == "cpu":
        check_without_gpu(config, f"offspec computes on the CPU{why}")
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus = [torch.cuda.get_device_properties(each) for each in chosen if each.type == "cuda"]
    check_memory(config, "this machine", ram, min((each.total_memory for each in gpus), default=None))
    notify(Notice(f"Computes on {devices.describe_devices(chosen)}{why}"))
    return replace(config, device=",".join(map(str, chosen)))


def check_without_gpu(config: EngineConfig, why: str) -> None:
    """Raise RequestError, beginning with `why`, if a setting is given that requires a GPU."""
    for name, given in (
        ("vram", config.vram is not None),
        ("cpu_layers", bool(config.cpu_layers)),
        ("experts", config.experts != AUTO),
    ):
        if given:
            instead = "; `memory` limits RAM" if name == "vram" else ""
            raise RequestError(f"{why}; omit `{name}`, which needs a GPU{instead}")


def check_memory(config: EngineConfig, machine: str, ram: int, vram: int | None) -> None:
    """Raise RequestError for a memory limit above the machine's memory.

    Args:
        config: Settings with the limits, if there are any.
        machine: Name of the machine.
        ram: Bytes of its RAM.
        vram: Bytes of its GPU, or of the smallest of several; None without a GPU.
    """
    for name, asked, there, kind in (
        ("memory", config.memory, ram, "RAM"),
        ("vram", config.vram, vram, "GPU memory"),
    ):
        if asked is not None and there is not None and asked > there:
            raise RequestError(
                f"`{name}` is {format_bytes(asked)}, and {machine} has {format_bytes(there)} of {kind}: give "
                "a smaller limit, or leave it out"
            )


def _with_index(names: str) -> str:
    """Return the device names with "cuda:0" for "cuda"."""
    return ",".join("cuda:0" if name == "cuda" else name for name in names.split(","))
