"""Plans made by a calibration run, and predicted compared with measured speed."""

from dataclasses import replace

import pytest

from offspec import RequestError
from offspec.engine import calibration_run as rehearsal
from offspec.engine import validation
from offspec.engine.calibration_run import answer_passes
from offspec.engine.validation import validate_plan
from offspec_planners.plan import Plan
from offspec_planners.plan.explain import explain
from tests.support.plan_fixtures import PlanEnvironment

pytestmark = pytest.mark.usefixtures("drafters_stay")


def test_no_choices_without_a_draft(plan_env: PlanEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    with plan_env.load(draft="none") as engine:
        assert (engine.plan, engine.budget, plan_env.measured) == (None, 1, 0)
    plan = rehearsal.make_plan(plan_env.config(draft="none"), notify=plan_env.notify)
    assert (plan.draft, plan.draft_mode, plan.budget, plan.width) == ("none", "none", 1, 1)
    assert plan.forecast.tokens_per_pass == 1.0 and plan.forecast.draft_seconds == 0.0
    for row in plan.what_ifs:
        assert row.tok_per_s is not None and row.tok_per_s <= 1.001 * plan.forecast.tok_per_s
    assert rehearsal.make_plan(plan_env.config(draft="none"), notify=plan_env.notify) == plan
    assert (plan_env.measured, plan_env.notices) == (1, [])


@pytest.mark.exhaustive
def test_explicit_plan_is_calibrated_with_the_draft(plan_env: PlanEnvironment, few_prompts: None) -> None:
    config = plan_env.config()
    plan = rehearsal.make_plan(config, notify=plan_env.notify)
    assert plan.acceptance.startswith("measured over") and plan_env.measured == 1
    assert rehearsal.make_plan(config, notify=plan_env.notify) == plan and plan_env.measured == 1
    assert plan_env.expect_reuse() == plan, "loading follows it as well"
    rehearsal.make_plan(plan_env.config(learn=False), replan=True)
    assert plan_env.measured == 2
    assert plan_env.notices == []
    assert Plan.from_text(plan.to_text()) == plan and explain(plan)


@pytest.mark.exhaustive
def test_predicted_and_measured_speed_are_compared(
    plan_env: PlanEnvironment, few_prompts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "measure", plan_env.measure)
    config = plan_env.config()
    for named in (config, replace(config, draft="none")):
        plan = rehearsal.make_plan(named, notify=plan_env.notify)
        prompts = ("w5 w9 w17 w33", "w64 w20 w7", "w8")
        found = validate_plan(named, plan, prompts=prompts, notify=plan_env.notify)
        assert 0 < len(found.rows) <= 3
        for row in found.rows:
            for figure in (row.seconds_per_pass, row.tok_per_s, row.tokens_per_pass):
                assert 0 < figure.predicted < 1e6 and 0 < figure.measured < 1e6
        if named.draft == "none":
            tokens = [row.tokens_per_pass for row in found.rows]
            assert {(both.predicted, both.measured) for both in tokens} == {(1.0, 1.0)}
    assert plan_env.notices == []


@pytest.mark.exhaustive
def test_answers_of_one_pass_are_not_compared(
    plan_env: PlanEnvironment, few_prompts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "measure", plan_env.measure)
    monkeypatch.setattr(
        validation,
        "answer_passes",
        lambda engine, prompt, params, count: answer_passes(engine, prompt, params, 1),
    )
    plan = rehearsal.make_plan(plan_env.config())
    with pytest.raises(RequestError, match="`context`") as caught:
        validate_plan(plan_env.config(), plan, prompts=("w5", "w9"), notify=plan_env.notify)
    assert "\n" not in str(caught.value)
