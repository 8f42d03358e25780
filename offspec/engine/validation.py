"""Validation of plans: predicted versus measured speed.

A disk's speed drifts within minutes, and some texts are easier to predict than others. So before each prompt,
passes are measured again and the draft previews its own answer; the prediction for the prompt uses both.
"""

from collections.abc import Sequence
from dataclasses import replace

from offspec.core.config import EngineConfig, SamplingParams
from offspec.core.errors import RequestError
from offspec.core.events import LoadProgress, ignore_event
from offspec.draft.open import Notify
from offspec.engine.calibration_run import answer_passes
from offspec.engine.engine import Engine
from offspec.plan.build_plan import acceptance_for, measure
from offspec.plan.calibration_prompts import VALIDATION
from offspec.plan.model_sizes import sizes_of
from offspec.plan.policy import DraftPolicy
from offspec.plan.prepare import Prepared, prepare
from offspec_planners.acceptance import Calibration
from offspec_planners.cost import PassCosts
from offspec_planners.plan import Plan
from offspec_planners.plan.forecast import Choice, Comparison, Validation, ValidationRow
from offspec_planners.search import forecast_speed, static_sweep

_TREES = 6  # previewed per prompt
_PASSES = 6  # measured per prompt, after a first pass with the prompt


def validate_plan(
    config: EngineConfig, plan: Plan, *, prompts: Sequence[str] = VALIDATION, notify: Notify
) -> Validation:
    """Load as planned; for each prompt, predict the speed, answer, and compare.

    Args:
        config: As for `make_plan`.
        plan: The plan to validate.
        prompts: Texts to answer, `VALIDATION` by default.
        notify: Receives LoadProgress and Notice events.

    Raises:
        OffspecError: See `offspec.core.errors`.
    """
    prepared = prepare(replace(config, cache_size=0), notify, named=plan)
    target = sizes_of(prepared.opened.target, config.model)
    prepared.record.keeps = False  # otherwise the next validation would use records of its own prompts
    rows = list[ValidationRow]()
    with Engine(
        prepared.config, prepared.assembly, notify, policy=prepared.policy, record=prepared.record
    ) as engine:
        engine.use(prepared.main)
        engine.set_draft_policy(
            replace(DraftPolicy.planned(plan, prepared.config, prepared.record), record=0, may_pause=False)
        )
        for number, prompt in enumerate(prompts):
            notify(LoadProgress("Comparing with real passes", number, len(prompts), "steps"))
            costs = measure(prepared.opened, prepared.assembly, prepared.config, ignore_event).costs(
                target, prepared.assembly.placement, plan.forecast.tokens_per_pass
            )
            params = SamplingParams(plan.temperature, seed=number, max_tokens=512)
            try:
                expected = _expected(engine, prepared, costs, prompt, params)
                (began, _), *passes = answer_passes(engine, prompt, params, 1 + _PASSES)
            except RequestError:  # too long for a small context
                continue
            if not passes:
                continue
            seconds, tokens = passes[-1][0] - began, sum(stats.emitted for _, stats in passes)
            rows.append(
                ValidationRow(
                    prompt,
                    seconds_per_pass=Comparison(expected.seconds_per_pass, seconds / len(passes)),
                    tok_per_s=Comparison(expected.tok_per_s, tokens / seconds),
                    tokens_per_pass=Comparison(expected.tokens_per_pass, tokens / len(passes)),
                )
            )
    if not rows:
        raise RequestError(
            "nothing to compare: no prompt fits the context, or each answer ended in its first pass, which "
            "is not measured; use a larger `context`, or more `prompts`"
        )
    return Validation(tuple(rows))


def _expected(
    engine: Engine, prepared: Prepared, costs: PassCosts, prompt: str, params: SamplingParams
) -> Choice:
    """Return the forecast for the passes of this answer."""
    if prepared.config.tree == "sequoia":
        known = acceptance_for(prepared.record, prepared.config).calibration
        return static_sweep(known, costs, [engine.budget], engine.width)[0].choice
    return forecast_speed(
        _calibration(engine, prepared, prompt, params), costs, engine.budget, engine.width
    ).choice


def _calibration(engine: Engine, prepared: Prepared, prompt: str, params: SamplingParams) -> Calibration:
    """Return the draft's calibration, with trees that it grows for this prompt."""
    known = acceptance_for(prepared.record, prepared.opened.config).calibration
    forest = engine.preview(prompt, params, trees=_TREES)
    return replace(known, forest=forest + known.forest[::2])
