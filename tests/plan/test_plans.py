"""Plans from run to run: saved and reused without measuring, renewed with a notice if they do not fit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import offspec
from offspec import SamplingParams
from offspec.core import memory as process_memory
from offspec.core.cache_dir import QUANTIZED
from offspec.engine import calibration_run as rehearsal
from offspec.plan import needs, prepare
from offspec.plan.load import open_models
from offspec.plan.prepare import draft_record
from offspec.plan.records import DraftRecord
from offspec_planners.measured_costs import MeasuredCosts
from tests.support.exhaustive import sampled_params
from tests.support.plan_fixtures import (
    GB,
    LAYERS,
    MB,
    MEASURED,
    PROMPT,
    PlanEnvironment,
    least_memory,
    save_plan,
    write_large,
)
from tests.support.tiny_models import disturb, tiny_engine, write_model

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
pytestmark = pytest.mark.usefixtures("drafters_stay")


def test_plan_is_saved_and_reused(plan_env: PlanEnvironment) -> None:
    plan = plan_env.plan()
    assert plan_env.measured == 1 and plan_env.notices == []
    assert plan.budget > 1 and plan.forecast.tokens_per_pass > 1
    assert plan_env.expect_reuse() == plan
    plan_env.expect_reuse(learn=False)
    assert plan_env.measured == 1
    plan_env.plan(replan=True)
    assert plan_env.measured == 2 and plan_env.notices == []


def test_each_case_has_its_own_plan(plan_env: PlanEnvironment) -> None:
    opened = open_models(plan_env.config(), lambda event: None)
    opened.close()

    def key(**settings: Any) -> str:
        asked = settings.get("draft", opened.draft_option)
        return prepare.plan_key(
            replace(opened, config=replace(opened.config, **settings), draft_option=asked)
        )

    own = {"memory": 2 * GB, "context": 64, "budget": 32, "width": 3, "verify": "plain", "tree": "sequoia"}
    own |= {"temperature": 0.6, "draft": "auto", "draft_bits": 4, "dtype": "bfloat16", "sequences": 4}
    cases = [{}, {"draft_bits": 3}, {"model": str(plan_env.near)}, *({name: own[name]} for name in own)]
    assert len({key(**case) for case in cases}) == len(cases)
    assert key(learn=False) == key() == key(model=f"{plan_env.target}/../{plan_env.target.name}")
    assert key(draft="self") == key(draft="substitute") != key()


@pytest.mark.exhaustive
def test_plan_of_several_sequences(plan_env: PlanEnvironment, tmp_path: Path) -> None:
    plan = plan_env.plan(sequences=4)
    assert (plan.sequences, plan.budget) == (4, 64) and plan.forecast.tokens_per_pass > 4
    assert [row.sequences for row in plan.shared][:3] == [1, 2, 4]
    assert plan_env.expect_reuse(sequences=4) == plan
    with plan_env.load(plan=save_plan(plan, tmp_path / "plan.json")) as engine:
        assert engine.config.sequences == 4 and engine.budget == 64
        assert engine.generate(PROMPT, GREEDY).token_ids
    roots = save_plan(plan, tmp_path / "roots.json", budget=4)
    with plan_env.load(plan=roots) as engine:
        assert engine.budget == 1, "a root for each of the sequences"
        assert engine.generate(PROMPT, GREEDY).token_ids


@pytest.mark.parametrize("which", sampled_params(["model", "draft"], "model"))
def test_changed_model_renews_the_plan(which: str, plan_env: PlanEnvironment, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "changing", num_hidden_layers=LAYERS)
    given = {which: str(folder)}
    old = plan_env.plan(**given)
    disturb(folder)
    new = plan_env.expect_replan("another version of", **given)
    assert (new.target_print != old.target_print) == (which == "model")
    assert which == "draft" or str(folder) in plan_env.notices[0]
    assert plan_env.expect_reuse(**given) == new


@pytest.mark.exhaustive
def test_changed_free_memory_renews_a_plan(
    plan_env: PlanEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_large(tmp_path / "large")
    settings = {"model": folder, "draft": "auto", "budget": 64}  # it keeps the draft
    least = least_memory(folder, draft="auto", budget=64)

    def free(more: int) -> None:
        size = int((least + more) / 0.9)
        monkeypatch.setattr(process_memory, "available_bytes", lambda: size)
        monkeypatch.setattr(process_memory, "resident_bytes", lambda: 0)

    free(12 * MB)
    tight = plan_env.plan(**settings)
    assert tight.placement.slots
    free(14 * MB)
    assert plan_env.expect_reuse(**settings) == tight, "a little more is left alone"
    free(2 * least)
    roomy = plan_env.expect_replan("are free now", **settings)
    assert not roomy.placement.slots
    free(9 * least)
    assert plan_env.expect_reuse(**settings) == roomy, "where nothing streams, more is of no use"
    free(12 * MB)
    again = plan_env.expect_replan("does not fit", **settings)
    assert again.placement == tight.placement


def test_plan_reports_a_busy_machine(plan_env: PlanEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_env.plan().notes == ()
    monkeypatch.setattr(prepare, "measure", lambda *given: replace(MEASURED, contended=True))
    (note,) = plan_env.plan(replan=True).notes
    assert "Other processes used the CPU" in note and "--replan" in note
    assert any("--replan" in notice for notice in plan_env.notices)


def _record(plan_env: PlanEnvironment) -> DraftRecord:
    opened = open_models(plan_env.config(), lambda event: None)
    opened.close()
    return draft_record(opened, 16)


@pytest.mark.exhaustive
def test_learned_acceptance_is_saved(plan_env: PlanEnvironment) -> None:
    assert plan_env.plan().acceptance.endswith("not measured")
    tau = plan_env.learn()
    found = _record(plan_env).find(0.0, True)
    assert found is not None and found.passes > 8 and len(found.forest) >= 8
    assert tau != 1.0 and found.fit.tau == pytest.approx(tau, abs=1e-5)
    plan = plan_env.expect_replan("the draft's acceptance rate is now measured")
    assert plan.acceptance == f"measured over {found.passes} passes"
    assert plan_env.expect_reuse() == plan, "once"
    with plan_env.load() as engine:
        known = engine.drafting.calibration(engine.sources[0], 0.0, True)
        assert known.fit.tau == pytest.approx(tau, abs=1e-5)


@pytest.mark.exhaustive
def test_nothing_is_learned_if_disabled(plan_env: PlanEnvironment) -> None:
    plan_env.plan()
    before = plan_env.files()
    plan_env.learn(learn=False)
    assert plan_env.files() == before and plan_env.expect_reuse(learn=False).acceptance.endswith(
        "not measured"
    )
    plan_env.learn(prompts=1)
    assert plan_env.files() != before


@pytest.mark.exhaustive
@pytest.mark.parametrize(("temperature", "given"), [(1.0, {}), (0.0, {"budget": 48, "width": 6})])
def test_static_tree_gives_the_same_answer(
    plan_env: PlanEnvironment, temperature: float, given: dict[str, int]
) -> None:
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=30, ignore_eos=True)
    with plan_env.load(tree="sequoia", temperature=temperature, **given) as engine:
        assert engine.plan is not None and engine.plan.tree == "sequoia"
        shape = engine.drafting.policy.shape
        assert shape is not None and 1 < len(shape) <= engine.budget == given.get("budget", engine.budget)
        alone = engine.generate(PROMPT, params, speculate=False)
        together = engine.generate(PROMPT, params, check=True)
        assert together.token_ids == alone.token_ids and together.mismatches == ()
        assert alone.passes == 30 > together.passes
        passes = [one for one in engine.stream(PROMPT, params) if isinstance(one, offspec.PassStats)]
        assert max(one.tree_nodes for one in passes) == len(shape)


def _no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave no room for a self-draft."""
    real = needs.draft_bytes
    monkeypatch.setattr(
        needs, "draft_bytes", lambda held, *rest: (1 << 60) if held[0] != "none" else real(held, *rest)
    )


def test_draft_that_does_not_fit_has_no_forecast(
    plan_env: PlanEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    _no_room(monkeypatch)
    for _ in range(2):
        with plan_env.load(draft="self") as engine:
            plan = engine.plan
            assert plan is not None and (plan.draft, plan.draft_mode) == ("self", "none")
            assert plan.budget == 1 and plan.forecast.tokens_per_pass == 1.0 and engine.draft == "none"
        assert len(plan_env.notices) == 1 and "no draft" in plan_env.notices[0]
    assert plan_env.measured == 1
    assert rehearsal.make_plan(plan_env.config(draft="self"), notify=plan_env.notify) == plan


def test_lookups_draft_without_a_plan_if_nothing_else_fits(
    plan_env: PlanEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    _no_room(monkeypatch)
    with plan_env.load(draft="auto") as engine:
        assert (engine.plan, engine.draft, engine.budget) == (None, "suffix", 64)
        prompt = [*PROMPT, *PROMPT[:4]]
        copied, alone = (engine.generate(prompt, GREEDY, draft=draft) for draft in (None, "none"))
        assert copied.token_ids == alone.token_ids
    assert len(plan_env.notices) == 1 and "suffix alone" in plan_env.notices[0] and plan_env.measured == 0
    plan = rehearsal.make_plan(plan_env.config(draft="auto"), notify=plan_env.notify)
    assert (plan.draft, plan.draft_mode, plan.budget) == ("auto", "none", 64)
    assert plan.forecast.tokens_per_pass == 1.0 and "suffix" in plan.notes[0]


@pytest.mark.exhaustive
def test_model_that_fits_answers_before_a_draft_is_prepared(
    plan_env: PlanEnvironment, few_prompts: None
) -> None:
    """If requested, until a plan shows that a draft pays; a named draft is prepared."""
    with plan_env.load(draft="auto", at_once=True) as engine:
        assert (engine.plan, engine.draft) == (None, "suffix")
        answer = engine.generate(PROMPT, GREEDY).token_ids
    assert plan_env.measured == 0 and not any((plan_env.cache / QUANTIZED).glob("*"))
    assert len(plan_env.notices) == 1 and "it starts without a draft model" in plan_env.notices[0]
    for settings in ({"draft": "self", "at_once": True}, {"draft": "auto", "memory": "3GB"}):
        with plan_env.load(**settings) as engine:
            assert engine.plan is not None and "self" in engine.draft
            assert engine.generate(PROMPT, GREEDY).token_ids == answer
    plan = rehearsal.make_plan(plan_env.config(draft="auto"), notify=plan_env.notify)
    assert plan.draft_mode != "none"
    with plan_env.load(draft="auto", at_once=True) as engine:
        assert engine.plan == plan and "self" in engine.draft and not plan_env.notices
        assert engine.generate(PROMPT, GREEDY).token_ids == answer


def test_streaming_model_is_planned(plan_env: PlanEnvironment, tmp_path: Path) -> None:
    folder = write_large(tmp_path / "large")
    least = least_memory(folder, draft="auto", budget=64)
    plan = plan_env.plan(model=folder, draft="auto", memory=least + 8 * MB, at_once=True)
    assert plan.placement.slots


def test_second_engine_fits_next_to_the_first(plan_env: PlanEnvironment) -> None:
    plan = plan_env.plan()
    with plan_env.load() as engine, tiny_engine(plan_env.target, "none") as other:
        assert engine.plan == plan
        assert other.generate(PROMPT, GREEDY).token_ids == engine.generate(PROMPT, GREEDY).token_ids
    assert plan_env.measured == 1


@pytest.mark.exhaustive
def test_shape_is_planned_again_from_learned_acceptance(plan_env: PlanEnvironment) -> None:
    """Trees of one shape leave no records of growth, and the plan's what-ifs do without."""
    plan_env.learn(tree="sequoia")
    plan = plan_env.expect_replan("the draft's acceptance rate is now measured", tree="sequoia")
    assert plan.tree == "sequoia" and plan.acceptance.startswith("measured")


@pytest.mark.parametrize("draft", sampled_params(["near", "auto"], "near"))
def test_slow_draft_leaves_its_memory_to_the_target(
    draft: str, plan_env: PlanEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = replace(MEASURED, step=((1, 1.0), (64, 2.0)))
    calls = list[object]()

    def measure(*given: object) -> MeasuredCosts:
        calls.append(given)
        return slow

    monkeypatch.setattr(prepare, "measure", measure)
    given: dict[str, Any] = {"draft": str(plan_env.near) if draft == "near" else draft}
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=20, ignore_eos=True)
    with plan_env.load(**given, budget=16, width=4) as engine:
        expected = engine.generate(PROMPT, params).token_ids
    for _ in range(2):
        with plan_env.load(**given) as engine:
            assert engine.plan is not None and engine.plan.draft_mode == "none"
            assert "left out" in engine.plan.notes[-1] and "tokens per second" in engine.plan.notes[-1]
            assert not engine.drafting.describe_sources(engine.drafting.names).startswith("near")
            assert engine.generate(PROMPT, params).token_ids == expected
        assert any("faster without the draft model" in text for text in plan_env.notices)
    assert len(calls) == 1, "the second run follows the plan of the first"
    with plan_env.load(**given, budget=16) as engine:
        assert engine.plan is not None and engine.plan.draft_mode != "none"
