"""Work for the CPU next to a GPU, by the predicted seconds of a pass: layers, or experts."""

import math
from collections.abc import Callable

from offspec_planners.placement import Placement
from offspec_planners.predictor import Predictor
from offspec_planners.search import Outlook

_WORTH_IT = 0.95  # of a pass's seconds: the CPU gets work if less is left of them
_AFTER = 3  # numbers of layers beyond the best that are tried


def fastest_cpu_layers(
    predictor: Predictor, chosen: Outlook, place: Callable[[int], Placement | None]
) -> int:
    """Number of layers with which a pass takes least time; 0 unless it is worth it.

    Args:
        predictor: Prices of passes.
        chosen: Trees of these passes.
        place: Returns the placement with a number of layers on the CPU, None if it does not fit.
    """
    first = place(0) if predictor.pricing.knows_cpu else None
    if first is None or first.by_need:  # experts stream, not layers
        return 0
    found, best = {0: predictor.pass_seconds(first, chosen)}, 0
    for layers in range(1, 1 + sum(tier.streams for tier in first.tiers)):
        placement = place(layers)
        if placement is None:  # RAM holds no more of them
            break
        found[layers] = predictor.pass_seconds(placement, chosen)
        best = min(found, key=lambda layers: found[layers])
        if layers > best + _AFTER:  # the CPU takes longer than the link by now
            break
    return best if found[best] < _WORTH_IT * found[0] else 0


def cpu_experts_pay(
    predictor: Predictor, chosen: Outlook, on_gpu: Placement | None, on_cpu: Placement | None
) -> bool:
    """Whether it is worth having the CPU compute the experts.

    It is where their products take the CPU less time, at the rows that an expert has in such a pass, than
    copying those that the GPU has no slots for.

    Args:
        predictor: Prices of passes.
        chosen: Trees of these passes.
        on_gpu: Placement with experts computed by the GPU; None if it does not fit.
        on_cpu: Placement with experts computed by the CPU; None if it does not fit.
    """
    if on_cpu is None or not on_cpu.by_need or not predictor.pricing.knows_cpu:
        return False
    if on_gpu is not None and not on_gpu.by_need:
        return False
    seconds = math.inf if on_gpu is None else predictor.pass_seconds(on_gpu, chosen)
    return predictor.pass_seconds(on_cpu, chosen) < _WORTH_IT * seconds
