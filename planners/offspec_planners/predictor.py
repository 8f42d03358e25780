"""Predicted speed of a target and its draft under any placement: prices, tree sizes and the forecast."""

from collections.abc import Sequence
from dataclasses import dataclass

from offspec_planners.acceptance import Calibration
from offspec_planners.cost import ModelSizes, PassCosts, Pricing, prefill_seconds
from offspec_planners.hardware_rates import Hardware
from offspec_planners.placement import Placement
from offspec_planners.plan.forecast import Choice, Forecast
from offspec_planners.search import STATIC_WIDTH, SpeedForecast, best, forecast_speed, static_sweep, sweep

_PROMPT = 512  # prompt tokens for the reported time to first token


@dataclass(frozen=True, slots=True)
class Predictor:
    """Prices of one target and draft, from plain sizes.

    Args:
        target: Sizes of the target.
        pricing: Costs of passes and draft steps.
        calibration: Acceptance of the draft's tokens.
        sequences: Number of sequences that share passes.
        tree: "dynamic", or "sequoia" for one shape.
        drafts: Whether anything but lookups drafts.
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

    def sweep(self, costs: PassCosts, budgets: Sequence[int], widths: Sequence[int]) -> list[SpeedForecast]:
        """Return the speed forecast of every budget, with every width for dynamic trees, else the last."""
        if self.tree == "sequoia" and self.drafts:
            width = min(widths[-1], STATIC_WIDTH)
            return static_sweep(self.calibration, costs, budgets, width, self.sequences)
        return sweep(self.calibration, costs, budgets, widths, self.sequences)

    def refined(self, costs: PassCosts, chosen: SpeedForecast) -> SpeedForecast:
        """Return a choice's forecast with its own placement's costs; static trees keep their forecast."""
        if self.tree == "sequoia":
            return chosen
        return forecast_speed(
            self.calibration, costs, chosen.choice.budget, chosen.choice.width, self.sequences
        )

    def pass_seconds(self, placement: Placement, chosen: SpeedForecast) -> float:
        """Return seconds of a pass over trees like the chosen ones."""
        costs = self.costs(placement, chosen.choice.tokens_per_pass).for_sequences(self.sequences)
        return float(costs.iteration(chosen.draft, max(1, round(chosen.nodes))))

    def best_speed(self, placement: Placement, near: Choice) -> float:
        """Return tokens per second with the best of a few budgets near a choice's."""
        least = self.sequences
        budgets = sorted({least, max(near.budget // 2, least), near.budget, 2 * near.budget})
        costs = self.costs(placement, near.tokens_per_pass)
        return best(self.sweep(costs, budgets if self.drafts else [least], [near.width])).choice.tok_per_s

    def speed_without_draft(self, placement: Placement) -> float:
        """Return tokens per second without a draft."""
        costs = self.costs(placement, 1.0)
        return forecast_speed(self.calibration, costs, self.sequences, 1, self.sequences).choice.tok_per_s

    def forecast(self, chosen: SpeedForecast, costs: PassCosts, hardware: Hardware) -> Forecast:
        """Return the forecast of a choice, with the time to the first token of a typical prompt.

        If several sequences share passes, a new request waits for the current pass, and is then part of the
        next.
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
