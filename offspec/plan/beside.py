"""How many layers the CPU should compute beside a GPU, by what passes are expected to take."""

from contextlib import suppress
from dataclasses import replace

from offspec.core.config import EngineConfig
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

    def seconds(layers: int) -> float:
        fit = opened.fit(replace(config, cpu_layers=layers))
        costs = pricing.costs(target, fit.placement, chosen.choice.tokens_per_pass)
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
