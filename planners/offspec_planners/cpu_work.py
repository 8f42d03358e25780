"""CPU work next to a GPU (layers or experts), chosen by the predicted seconds of a pass."""

import math
from collections.abc import Callable

from offspec_planners.placement import Placement
from offspec_planners.predictor import Predictor
from offspec_planners.search import SpeedForecast

_WORTH_IT = 0.95  # the CPU gets work if it shortens a pass to less than this share
_AFTER = 3  # how many larger numbers of layers to try beyond the best


def fastest_cpu_layers(
    predictor: Predictor, chosen: SpeedForecast, place: Callable[[int], Placement | None]
) -> int:
    """Return the number of CPU layers that minimizes the time of a pass; 0 unless the gain is worth it.

    Args:
        predictor: Prices of passes.
        chosen: Trees of these passes.
        place: Returns the placement with a number of layers on the CPU, None if it does not fit.
    """
    first = place(0) if predictor.pricing.knows_cpu else None
    if first is None or first.on_demand_experts:  # experts are loaded on demand, and no layers stream
        return 0
    found, best = {0: predictor.pass_seconds(first, chosen)}, 0
    for layers in range(1, 1 + sum(tier.streams for tier in first.tiers)):
        placement = place(layers)
        if placement is None:  # no more fit in RAM
            break
        found[layers] = predictor.pass_seconds(placement, chosen)
        best = min(found, key=lambda layers: found[layers])
        if layers > best + _AFTER:  # the CPU now takes longer than the link
            break
    return best if found[best] < _WORTH_IT * found[0] else 0


def cpu_experts_pay(
    predictor: Predictor, chosen: SpeedForecast, on_gpu: Placement | None, on_cpu: Placement | None
) -> bool:
    """Return whether the CPU should compute the experts.

    It should if computing them on the CPU, at the rows per expert of such a pass, takes less time than
    copying the experts that the GPU has no slots for.

    Args:
        predictor: Prices of passes.
        chosen: Trees of these passes.
        on_gpu: Placement with experts computed by the GPU; None if it does not fit.
        on_cpu: Placement with experts computed by the CPU; None if it does not fit.
    """
    if on_cpu is None or not on_cpu.on_demand_experts or not predictor.pricing.knows_cpu:
        return False
    if on_gpu is not None and not on_gpu.on_demand_experts:
        return False
    seconds = math.inf if on_gpu is None else predictor.pass_seconds(on_gpu, chosen)
    return predictor.pass_seconds(on_cpu, chosen) < _WORTH_IT * seconds
