"""Predicted speed of a target and its draft under any placement: prices, tree sizes and the forecast."""

from collections.abc import Sequence
from dataclasses import dataclass

from offspec_planners.acceptance import Calibration
from offspec_planners.cost import ModelSizes, PassCosts, Pricing, prefill_seconds
from offspec_planners.hardware_rates import Hardware
from offspec_planners.placement import Placement
from offspec_planners.plan.forecast import Choice, Forecast
from offspec_planners.search import STATIC_WIDTH, Outlook, best, outlook, static_sweep, sweep

_PROMPT = 512  # tokens of the prompt that the time to a first token is told for


@dataclass(frozen=True, slots=True)
class Predictor:
    """Prices of one target and draft, from plain sizes.

    Args:
        target: Sizes of the target.
        pricing: Costs of passes and draft steps.
        calibration: How often the draft's tokens are accepted.
        sequences: Number of sequences that share passes.
        tree: "dynamic", or "sequoia" for one shape.
        drafts: Whether anything drafts but lookups.
    """

    target: ModelSizes
    pricing: Pricing
    calibration: Calibration
    sequences: int = 1
    tree: str = "dynamic"
    drafts: bool = True

    def costs(self, placement: Placement, walked: float) -> PassCosts:
        """Costs of passes that walk `walked` nodes."""
        return self.pricing.costs(self.target, placement, walked)

    def sweep(self, costs: PassCosts, budgets: Sequence[int], widths: Sequence[int]) -> list[Outlook]:
        """Outlook of every budget, with every width if trees grow dynamically, else with the last."""
        if self.tree == "sequoia" and self.drafts:
            width = min(widths[-1], STATIC_WIDTH)
            return static_sweep(self.calibration, costs, budgets, width, self.sequences)
        return sweep(self.calibration, costs, budgets, widths, self.sequences)

    def refined(self, costs: PassCosts, chosen: Outlook) -> Outlook:
        """Outlook of a choice by the costs of its own placement; a tree of one shape keeps its outlook."""
        if self.tree == "sequoia":
            return chosen
        return outlook(self.calibration, costs, chosen.choice.budget, chosen.choice.width, self.sequences)

    def pass_seconds(self, placement: Placement, chosen: Outlook) -> float:
        """Seconds of a pass over trees like the chosen ones."""
        costs = self.costs(placement, chosen.choice.tokens_per_pass).for_sequences(self.sequences)
        return float(costs.iteration(chosen.draft, max(1, round(chosen.nodes))))

    def best_speed(self, placement: Placement, near: Choice) -> float:
        """Tokens per second with the best of a few budgets near those of a choice."""
        least = self.sequences
        budgets = sorted({least, max(near.budget // 2, least), near.budget, 2 * near.budget})
        costs = self.costs(placement, near.tokens_per_pass)
        return best(self.sweep(costs, budgets if self.drafts else [least], [near.width])).choice.tok_per_s

    def plain_speed(self, placement: Placement) -> float:
        """Tokens per second without a draft."""
        costs = self.costs(placement, 1.0)
        return outlook(self.calibration, costs, self.sequences, 1, self.sequences).choice.tok_per_s

    def forecast(self, chosen: Outlook, costs: PassCosts, hardware: Hardware) -> Forecast:
        """Forecast of a choice, with the time to the first token of a prompt of common length.

        Where several sequences share passes, one that comes waits for a pass of the others, and then with
        them.
        """
        costs = costs.for_sequences(self.sequences)
        nodes = max(1, round(chosen.nodes))
        drafted = float(costs.step_seconds(_PROMPT)) + chosen.draft if chosen.draft else 0.0
        prefill = prefill_seconds(costs, self.target, hardware.processor, _PROMPT + nodes)
        waited = chosen.choice.seconds_per_pass if self.sequences > 1 else 0.0
        return Forecast(
            ttft_s=waited + drafted + prefill,
            prompt_tokens=_PROMPT,
            seconds_per_pass=chosen.choice.seconds_per_pass,
            tokens_per_pass=chosen.choice.tokens_per_pass,
            tok_per_s=chosen.choice.tok_per_s,
            draft_seconds=chosen.draft,
            compute_seconds=float(costs.compute_seconds(nodes)),
            link_seconds=float(costs.link_seconds(nodes)),
            bound=costs.bound(chosen.draft, nodes),
        )
