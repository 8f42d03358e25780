"""Choice of the CPU's work next to a GPU: fits for the numbers that decide it; see `cpu_work`."""

from dataclasses import replace

from offspec.core.config import EngineConfig, Experts
from offspec.plan.fit import try_fit
from offspec.plan.opened import OpenedModels
from offspec_planners.cpu_work import cpu_experts_pay, fastest_cpu_layers
from offspec_planners.placement import Placement
from offspec_planners.predictor import Predictor
from offspec_planners.search import Outlook


def choose_cpu_layers(
    opened: OpenedModels, config: EngineConfig, predictor: Predictor, chosen: Outlook
) -> int:
    """Number of layers that the CPU should compute.

    Args:
        opened: Models that memory is divided among.
        config: Settings with a budget and a width.
        predictor: Prices of passes.
        chosen: Trees of these passes.
    """

    def place(layers: int) -> Placement | None:
        fit = try_fit(opened, replace(config, cpu_layers=layers))
        return None if fit is None else fit.placement

    return 0 if opened.vram is None else fastest_cpu_layers(predictor, chosen, place)


def choose_cpu_experts(
    opened: OpenedModels, config: EngineConfig, predictor: Predictor, chosen: Outlook
) -> bool:
    """Whether the CPU should compute the experts. Arguments: see `choose_cpu_layers`."""

    def place(experts: Experts) -> Placement | None:
        fit = try_fit(opened, replace(config, experts=experts))
        return None if fit is None else fit.placement

    if opened.vram is None or not opened.target.experts.count:
        return False
    return cpu_experts_pay(predictor, chosen, place("gpu"), place("cpu"))
