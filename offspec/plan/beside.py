"""What the CPU should compute beside a GPU, by what passes are expected to take: layers, or experts."""

import math
from contextlib import suppress
from dataclasses import replace
from typing import get_args

from offspec.core.config import EngineConfig, Experts
from offspec.core.errors import CapacityError
from offspec.plan.fit import Opened
from offspec_planners.cost import ModelSizes, Pricing
from offspec_planners.search import Outlook

_WORTH_IT = 0.95  # of a pass's seconds: layers go to the CPU where less is left of them

_AFTER = 3  # numbers of layers beyond the best that are tried


def fastest_cpu_layers(
    opened: Opened, config: EngineConfig, pricing: Pricing, target: ModelSizes, chosen: Outlook
) -> int:
    """The number with which a pass over trees like the chosen ones takes least time; 0 unless it is worth it.

    Args:
        opened: What memory is divided among.
        config: Settings with a budget and a width.
        pricing: What passes cost.
        target: Sizes of the target.
        chosen: The trees.
    """
    if opened.vram is None or not pricing.knows_cpu:
        return 0
    if opened.fit(replace(config, cpu_layers=0)).placement.by_need:
        return 0  # what streams is no layers

    def seconds(layers: int) -> float:
        fit = opened.fit(replace(config, cpu_layers=layers))
        costs = pricing.costs(target, fit.placement, chosen.choice.tokens_per_pass)
        costs = costs.for_sequences(config.least_sequences)
        return float(costs.iteration(chosen.draft, max(1, round(chosen.nodes))))

    streamed = sum(tier.streams for tier in opened.fit(replace(config, cpu_layers=0)).placement.tiers)
    found = {0: seconds(0)}
    best = 0
    with suppress(CapacityError):  # RAM holds no more of them
        for layers in range(1, streamed + 1):
            found[layers] = seconds(layers)
            best = min(found, key=lambda layers: found[layers])
            if layers > best + _AFTER:  # the CPU takes longer than the link by now
                break
    return best if found[best] < _WORTH_IT * found[0] else 0


def cpu_experts_pay(
    opened: Opened, config: EngineConfig, pricing: Pricing, target: ModelSizes, chosen: Outlook
) -> bool:
    """Whether a pass over trees like the chosen ones is worth having the CPU compute the experts.

    It is where their products take the CPU less time, at the rows that an expert has in such a pass, than
    copying those that the GPU has no slots for. Arguments: see `fastest_cpu_layers`.
    """
    if opened.vram is None or not pricing.knows_cpu:
        return False
    found = dict[Experts, float]()
    for way in get_args(Experts)[1:]:
        with suppress(CapacityError):
            placement = opened.fit(replace(config, experts=way)).placement
            if not placement.by_need:
                return False
            costs = pricing.costs(target, placement, chosen.choice.tokens_per_pass)
            costs = costs.for_sequences(config.least_sequences)
            found[way] = float(costs.iteration(chosen.draft, max(1, round(chosen.nodes))))
    return "cpu" in found and found["cpu"] < _WORTH_IT * found.get("gpu", math.inf)
