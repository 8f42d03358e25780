"""Choice of the CPU's work next to a GPU: each option is laid out in memory, and `cpu_work` compares them."""

from dataclasses import replace
from typing import get_args

from offspec.core.config import EngineConfig, Experts
from offspec.plan.fit import try_fit
from offspec.plan.opened import OpenedModels
from offspec_planners.cpu_work import cpu_experts_pay, fastest_cpu_layers
from offspec_planners.placement import Placement
from offspec_planners.predictor import Predictor
from offspec_planners.search import SpeedForecast


def choose_cpu_layers(
    opened: OpenedModels, config: EngineConfig, predictor: Predictor, chosen: SpeedForecast
) -> int:
    """Return the number of layers that the CPU should compute.

    Args:
        opened: Models that memory is divided among.
        config: Settings with a budget and a width.
        predictor: Prices of passes.
        chosen: Trees of these passes.
    """
    if opened.vram is None:
        return 0
    return fastest_cpu_layers(
        predictor, chosen, lambda layers: _place(opened, replace(config, cpu_layers=layers))
    )


def choose_cpu_experts(
    opened: OpenedModels, config: EngineConfig, predictor: Predictor, chosen: SpeedForecast
) -> bool:
    """Return whether the CPU should compute the experts. Arguments: see `choose_cpu_layers`."""
    if opened.vram is None or not opened.target.experts.count:
        return False
    on_gpu, on_cpu = (_place(opened, replace(config, experts=way)) for way in get_args(Experts)[1:])
    return cpu_experts_pay(predictor, chosen, on_gpu, on_cpu)


def _place(opened: OpenedModels, config: EngineConfig) -> Placement | None:
    fit = try_fit(opened, config)
    return None if fit is None else fit.placement
