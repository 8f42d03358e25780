"""Predicted beside measured speed of a plan.

A disk's speed drifts by the minute, and one text is easier to predict than another. So before each prompt the
passes are measured again, the draft previews an answer of its own, and the prediction for this prompt is what
the plan would say by that.
"""

from collections.abc import Sequence
from dataclasses import replace

from offspec.core.config import EngineConfig, SamplingParams
from offspec.core.errors import RequestError
from offspec.core.events import LoadProgress, unheard
from offspec.draft.open import Notify
from offspec.engine.engine import Engine
from offspec.engine.rehearsal import answer_passes
from offspec.plan.make import acceptance_for, measure
from offspec.plan.model_sizes import sizes_of
from offspec.plan.policy import DraftPolicy
from offspec.plan.prepare import Prepared, prepare
from offspec.plan.prompts import VALIDATION
from offspec_planners.acceptance import Calibration
from offspec_planners.cost import PassCosts
from offspec_planners.plan import Plan
from offspec_planners.plan.forecast import Choice, Comparison, Validation, ValidationRow
from offspec_planners.search import outlook, static_sweep

_TREES = 6  # that are previewed for a prompt
_PASSES = 6  # of each prompt that count; the one before them carries the prompt


def validate_plan(
    config: EngineConfig, plan: Plan, *, prompts: Sequence[str] = VALIDATION, notify: Notify
) -> Validation:
    """Load as planned, and for each prompt predict, answer, and compare.

    Args:
        config: As for `make_plan`.
        plan: The plan to validate.
        prompts: Texts to answer, `VALIDATION` by default.
        notify: Takes LoadProgress and Notice events.

    Raises:
        OffspecError: See `offspec.core.errors`.
    """
    prepared = prepare(replace(config, cache_size=0), notify, named=plan)
    target = sizes_of(prepared.opened.target, config.model)
    prepared.record.keeps = False  # or the next validation would know the prompts
    rows = list[ValidationRow]()
    with Engine(
        prepared.config, prepared.assembly, notify, policy=prepared.policy, record=prepared.record
    ) as engine:
        engine.use(prepared.main)
        engine.follow(
            replace(DraftPolicy.planned(plan, prepared.config, prepared.record), record=0, rests=False)
        )
        for number, prompt in enumerate(prompts):
            notify(LoadProgress("Comparing with real passes", number, len(prompts), "steps"))
            costs = measure(prepared.opened, prepared.assembly, prepared.config, unheard).costs(
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
            "nothing to compare: no prompt fitted the context, or each answer was over with its first pass, "
            "which does not count; give a larger `context`, or more `prompts`"
        )
    return Validation(tuple(rows))


def _expected(
    engine: Engine, prepared: Prepared, costs: PassCosts, prompt: str, params: SamplingParams
) -> Choice:
    """What passes of this answer should cost and bring."""
    if prepared.config.tree == "sequoia":
        known = acceptance_for(prepared.record, prepared.config).calibration
        return static_sweep(known, costs, [engine.budget], engine.width)[0].choice
    return outlook(_guesses(engine, prepared, prompt, params), costs, engine.budget, engine.width).choice


def _guesses(engine: Engine, prepared: Prepared, prompt: str, params: SamplingParams) -> Calibration:
    """What is known of the draft, with trees that it grows for this very prompt."""
    known = acceptance_for(prepared.record, prepared.opened.config).calibration
    forest = engine.preview(prompt, params, trees=_TREES)
    return replace(known, forest=forest + known.forest[::2])
