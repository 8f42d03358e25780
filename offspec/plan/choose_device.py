"""Where a model is computed: on the devices that are named, or on a usable GPU, else on the CPU."""

import os
from dataclasses import replace

import torch

from offspec.core.config import AUTO, EngineConfig
from offspec.core.errors import PlanError, RequestError
from offspec.core.events import Notice, unheard
from offspec.draft.open import Notify
from offspec.model import device as devices
from offspec_planners.measure import gpu
from offspec_planners.plan import Plan
from offspec_planners.units import format_bytes

AS_GIVEN = ", as `device` says"  # the reason in the notice if the configuration names devices


def choose_device(config: EngineConfig, notify: Notify = unheard, plan: Plan | None = None) -> EngineConfig:
    """The configuration with the devices that its `device` stands for, "cpu" or names with an index.

    Args:
        config: Memory limits and settings.
        notify: Takes a Notice that says where the model is computed, and why there.
        plan: The plan to follow, whose device is taken if `config` has "auto".

    Raises:
        PlanError: The plan is for another device.
        RequestError: There is no such device, a setting is for GPUs and there is none, or a memory limit is
            above what the machine has.
    """
    asked = devices.resolve("all") if config.device == "all" else _with_index(config.device)
    if plan is not None and asked not in (AUTO, _with_index(plan.device)):
        raise PlanError(f"the plan has device {plan.device}, not {asked}: leave out `device`, or the plan")
    if asked != AUTO:
        names, why = asked, AS_GIVEN
    elif plan is not None:
        names, why = plan.device, ", as the plan says"
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
    notify(Notice(f"Computes on {devices.described(chosen)}{why}"))
    return replace(config, device=",".join(map(str, chosen)))


def check_without_gpu(config: EngineConfig, why: str) -> None:
    """Raise RequestError, which begins with `why`, if a setting is given that only a GPU has a use for."""
    for name, given in (
        ("vram", config.vram is not None),
        ("cpu_layers", bool(config.cpu_layers)),
        ("experts", config.experts != AUTO),
    ):
        if given:
            instead = "; `memory` limits RAM" if name == "vram" else ""
            raise RequestError(f"{why}; leave out `{name}`, which is for a GPU{instead}")


def check_memory(config: EngineConfig, machine: str, ram: int, vram: int | None) -> None:
    """Raise RequestError for a memory limit above what a machine has.

    Args:
        config: With the limits, if there are any.
        machine: Its name.
        ram: Bytes that it has.
        vram: Bytes that its GPU has, or the smallest of several; None without a GPU.
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
    """Names of devices with "cuda:0" for "cuda"."""
    return ",".join("cuda:0" if name == "cuda" else name for name in names.split(","))
