"""Work for the CPU next to a GPU, by the predicted seconds of a pass: layers, or experts."""

import math
from dataclasses import replace
from typing import get_args

from offspec.core.config import EngineConfig, Experts
from offspec.plan.fit import try_fit
from offspec.plan.opened import OpenedModels
from offspec_planners.placement import Placement
from offspec_planners.predictor import Predictor
from offspec_planners.search import Outlook

_WORTH_IT = 0.95  # of a pass's seconds: the CPU gets work if less is left of them
_AFTER = 3  # numbers of layers beyond the best that are tried


def choose_cpu_layers(
    opened: OpenedModels, config: EngineConfig, predictor: Predictor, chosen: Outlook
) -> int:
    """Number of layers with which a pass takes least time; 0 unless it is worth it.

    Args:
        opened: Models that memory is divided among.
        config: Settings with a budget and a width.
        predictor: Prices of passes.
        chosen: Trees of these passes.
    """
    if opened.vram is None or not predictor.pricing.knows_cpu:
        return 0
    first = _place(opened, replace(config, cpu_layers=0))
    if first is None or first.by_need:  # experts stream, not layers
        return 0
    found, best = {0: predictor.pass_seconds(first, chosen)}, 0
    for layers in range(1, 1 + sum(tier.streams for tier in first.tiers)):
        placement = _place(opened, replace(config, cpu_layers=layers))
        if placement is None:  # RAM holds no more of them
            break
        found[layers] = predictor.pass_seconds(placement, chosen)
        best = min(found, key=lambda layers: found[layers])
        if layers > best + _AFTER:  # the CPU takes longer than the link by now
            break
    return best if found[best] < _WORTH_IT * found[0] else 0


def choose_cpu_experts(
    opened: OpenedModels, config: EngineConfig, predictor: Predictor, chosen: Outlook
) -> bool:
    """Whether it is worth having the CPU compute the experts. Arguments: see `choose_cpu_layers`.

    It is where their products take the CPU less time, at the rows that an expert has in such a pass, than
    copying those that the GPU has no slots for.
    """
    if opened.vram is None or not opened.target.experts.count:
        return False
    on_gpu, on_cpu = (_place(opened, replace(config, experts=way)) for way in get_args(Experts)[1:])
    if on_cpu is None or not on_cpu.by_need or not predictor.pricing.knows_cpu:
        return False
    if on_gpu is not None and not on_gpu.by_need:
        return False
    seconds = math.inf if on_gpu is None else predictor.pass_seconds(on_gpu, chosen)
    return predictor.pass_seconds(on_cpu, chosen) < _WORTH_IT * seconds


def _place(opened: OpenedModels, config: EngineConfig) -> Placement | None:
    fit = try_fit(opened, config)
    return None if fit is None else fit.placement
