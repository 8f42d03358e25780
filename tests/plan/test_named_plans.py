"""Plans that the user names, and may have edited: followed unchanged, or one line why not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import offspec
from offspec import PlanError, RequestError, SamplingParams
from offspec.core import memory as process_memory
from offspec.core.errors import UnsupportedModelError
from offspec_planners.placement import Tier
from offspec_planners.plan import Plan
from tests.support.plan_fixtures import (
    GB,
    LAYERS,
    MB,
    PROMPT,
    PlanEnvironment,
    least_memory,
    save_plan,
    scripted_planning,
    write_large,
)
from tests.support.tiny_models import reference, write_model

TOKENS = 16
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)


@pytest.mark.exhaustive
def test_less_memory_renews_a_plan(
    plan_env: PlanEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_large(tmp_path / "large")
    settings = {"model": folder, "draft": "auto", "budget": 64}  # it keeps the draft
    plan = plan_env.plan(memory="3GB", **settings)
    file = save_plan(plan, tmp_path / "plan.json")
    assert plan_env.expect_reuse(plan=file, **settings).to_json() == plan.to_json()
    given = least_memory(folder, draft="auto", budget=64) + 12 * MB
    new = plan_env.expect_replan(
        "the plan is for 3.00 GB and does not fit in", plan=file, memory=given, **settings
    )
    assert new.memory == given and new.placement.slots
    monkeypatch.setattr(process_memory, "available_bytes", lambda: given)
    monkeypatch.setattr(process_memory, "resident_bytes", lambda: 0)
    assert plan_env.expect_replan(
        "the plan is for 3.00 GB and does not fit in", plan=file, **settings
    ).placement.slots


@pytest.fixture(scope="module")
def plan(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Return the plan that a load without further settings makes and follows."""
    with pytest.MonkeyPatch.context() as patch:
        return scripted_planning(pair, tmp_path_factory.mktemp("cache"), patch).plan()


@pytest.fixture
def file(plan: Plan, tmp_path: Path) -> str:
    return save_plan(plan, tmp_path / "plan.json")


def test_named_plan_of_other_models_is_an_error(plan_env: PlanEnvironment, file: str, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", num_hidden_layers=LAYERS, seed=9)
    with pytest.raises(PlanError, match=r"made for .*target.*offspec plan"):
        plan_env.load(model=other, plan=file)
    with pytest.raises(PlanError, match=r"for the draft .*near.*offspec plan"):
        plan_env.load(draft=str(other), plan=file)
    with pytest.raises(PlanError, match=r"nowhere\.json"):
        plan_env.load(plan=tmp_path / "nowhere.json")
    assert plan_env.measured == 0


def test_named_plan_has_its_own_settings(plan_env: PlanEnvironment, tmp_path: Path) -> None:
    """Draft, context, memory and data type are the plan's unless the caller sets them."""
    plan = plan_env.plan(draft=str(plan_env.near), draft_bits=4, memory="2GB", context=96, temperature=0.6)
    for given in (save_plan(plan, tmp_path / "plan.json"), plan):
        with offspec.load(str(plan_env.target), plan=given, notify=plan_env.notify) as engine:
            assert engine.plan == plan and engine.context == 96
            assert engine.placement["memory"] == 2_000_000_000
            assert (engine.config.temperature, engine.config.dtype) == (0.6, "float32")
            assert engine.draft == "near (4-bit)"
    assert (plan_env.measured, plan_env.notices) == (1, [])


def test_kv_cache_format_follows_the_plan(plan_env: PlanEnvironment, file: str, tmp_path: Path) -> None:
    plan = plan_env.plan(kv_cache="int8")
    assert plan.kv_cache == "int8"
    with plan_env.load(plan=save_plan(plan, tmp_path / "int8.json")) as engine:
        assert engine.config.kv_cache == engine.placement["kv_cache"] == "int8"
    with pytest.raises(PlanError, match="kv_cache model, not int8: leave out `kv_cache`"):
        plan_env.load(plan=file, kv_cache="int8")


def test_target_format_follows_the_plan(
    plan_env: PlanEnvironment, plan: Plan, file: str, tmp_path: Path
) -> None:
    assert plan.quantize is None
    with pytest.raises(UnsupportedModelError, match="cannot be packed"):  # its matrices are too small
        plan_env.load(plan=save_plan(replace(plan, quantize="int8"), tmp_path / "int8.json"))
    with pytest.raises(PlanError, match="quantize none, not nf4: leave out `quantize`"):
        plan_env.load(plan=file, quantize="nf4")


@pytest.mark.exhaustive
def test_draft_bits_follow_the_plan(plan_env: PlanEnvironment, tmp_path: Path) -> None:
    plan = plan_env.plan(draft_bits=3)
    assert (plan.draft_mode, plan.draft_bits) == ("expanded", 3)
    file = save_plan(plan, tmp_path / "plan.json")
    for bits in (None, 3):
        with plan_env.load(plan=file, draft_bits=bits) as engine:
            assert (engine.plan, engine.draft) == (plan, "near (3-bit)")
    with pytest.raises(PlanError, match="draft_bits 3, not 4: leave out `draft_bits`"):
        plan_env.load(plan=file, draft_bits=4)
    mine = plan_env.plan(draft="auto")
    assert mine.draft_bits == 4, "the most that fit"
    two = save_plan(mine, tmp_path / "mine.json", draft_mode="packed", draft_bits=2)
    with plan_env.load(draft="auto", plan=two) as engine:
        assert engine.draft == "self (2-bit) + suffix"
        answer = engine.generate(PROMPT, GREEDY)
        assert list(answer.token_ids) == reference(plan_env.target, PROMPT, TOKENS)
    assert (plan_env.measured, plan_env.notices) == (2, [])


def test_settings_of_the_caller_override_the_plan(plan_env: PlanEnvironment, file: str) -> None:
    for budget in (5, 300):
        with plan_env.load(plan=file, budget=budget, width=2, context=64, memory="2GB") as engine:
            assert (engine.budget, engine.width, engine.context) == (budget, 2, 64)
            assert engine.placement["memory"] == 2 * GB
    assert (plan_env.measured, plan_env.notices) == (0, [])
    assert plan_env.plan(plan=file, replan=True).budget > 1 and plan_env.measured == 1


def test_settings_that_conflict_with_the_plan(plan_env: PlanEnvironment, file: str, tmp_path: Path) -> None:
    static = save_plan(plan_env.plan(tree="sequoia"), tmp_path / "static.json")
    assert plan_env.expect_reuse(plan=static).tree == "sequoia"
    with pytest.raises(PlanError, match="tree dynamic, not sequoia: leave out `tree`"):
        plan_env.load(plan=file, tree="sequoia")
    with pytest.raises(PlanError, match="device cpu, not cuda:0: leave out `device`"):
        plan_env.load(plan=file, device="cuda")
    with pytest.raises(RequestError, match="10000 exceeds the model's limit of 512 tokens"):
        plan_env.load(
            plan=save_plan(plan_env.expect_reuse(plan=file), tmp_path / "long.json", context=10_000),
            context=None,
        )


@pytest.mark.exhaustive
@pytest.mark.usefixtures("drafters_stay")
def test_named_plan_ignores_saved_measurements(plan_env: PlanEnvironment, tmp_path: Path) -> None:
    """New measurements of the draft would remake a saved plan; a named plan is followed unchanged."""
    plan = plan_env.plan()
    file = save_plan(plan, tmp_path / "plan.json")
    plan_env.learn()
    assert plan_env.expect_reuse(plan=file) == plan
    plan_env.expect_replan("the draft's acceptance rate is now measured")


STREAMED = {"tiers": "2 disk, 1 device, 2 disk", "slots": 2, "head": "device", "staging": 0}
HEAD_TOO = {"tiers": "5 device", "slots": 2, "head": "disk", "staging": 0}


@pytest.mark.parametrize(
    "changes",
    [
        {"budget": 7, "placement": STREAMED, "chunk": 3},
        pytest.param({"width": 64, "budget": 512}, marks=pytest.mark.exhaustive),
        pytest.param({"budget": 1, "placement": HEAD_TOO, "context": 80}, marks=pytest.mark.exhaustive),
        {"tree": "sequoia", "depth": 0, "temperature": 1.0},
    ],
)
def test_edited_plan_is_followed(
    plan_env: PlanEnvironment, plan: Plan, tmp_path: Path, changes: dict[str, Any]
) -> None:
    with plan_env.load(plan=save_plan(plan, tmp_path / "plan.json", **changes)) as engine:
        assert (plan_env.notices, plan_env.measured) == ([], 0)
        assert engine.budget == changes.get("budget", plan.budget)
        assert engine.width == changes.get("width", plan.width)
        answer = engine.generate(PROMPT, GREEDY)
        assert list(answer.token_ids) == reference(plan_env.target, PROMPT, TOKENS)
        assert (answer.bytes_streamed > 0) == ("placement" in changes)


def test_edited_plan_that_does_not_fit_is_renewed(plan_env: PlanEnvironment, tmp_path: Path) -> None:
    plan = plan_env.plan(memory="2GB")
    rest = {"head": "device", "staging": 0}
    for changes in (
        {"budget": 10_000_000},
        {"placement": {"tiers": "4 device", "slots": 0, **rest}},
        {"placement": {"tiers": "5 disk", "slots": 1_000_000_000, **rest}},
    ):
        file = save_plan(plan, tmp_path / "plan.json", **changes)
        assert plan_env.expect_replan("does not fit in 2.00 GB", plan=file).to_json() == plan.to_json()


def test_plan_may_omit_the_draft(plan_env: PlanEnvironment, plan: Plan, tmp_path: Path) -> None:
    with plan_env.load(
        plan=save_plan(plan, tmp_path / "plan.json", draft_mode="none", draft_bits=16)
    ) as engine:
        assert engine.draft == "none"
    assert ["without the draft model" in text for text in plan_env.notices] == [True]


def test_head_shared_by_a_self_draft_cannot_stream(plan_env: PlanEnvironment, tmp_path: Path) -> None:
    file = save_plan(plan_env.plan(draft="auto"), tmp_path / "plan.json", placement=HEAD_TOO)
    assert plan_env.expect_replan("does not fit", plan=file, draft="auto").placement.head is Tier.DEVICE
