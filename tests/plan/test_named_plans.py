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
    saved,
    stage,
    write_large,
)
from tests.support.tiny_models import reference, write_model

TOKENS = 16
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)


@pytest.mark.exhaustive
def test_less_memory_remakes_a_plan(
    world: PlanEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_large(tmp_path / "large")
    settings = {"model": folder, "draft": "auto", "budget": 64}  # which keeps the draft
    plan = world.plan(memory="3GB", **settings)
    file = saved(plan, tmp_path / "plan.json")
    assert world.followed(plan=file, **settings).to_json() == plan.to_json()
    given = least_memory(folder, draft="auto", budget=64) + 12 * MB
    new = world.remade("made for 3.00 GB and does not fit in", plan=file, memory=given, **settings)
    assert new.memory == given and new.placement.slots
    monkeypatch.setattr(process_memory, "available_bytes", lambda: given)
    monkeypatch.setattr(process_memory, "resident_bytes", lambda: 0)
    assert world.remade("made for 3.00 GB and does not fit in", plan=file, **settings).placement.slots


@pytest.fixture(scope="module")
def plan(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Return the plan that a load without further settings makes and follows."""
    with pytest.MonkeyPatch.context() as patch:
        return stage(pair, tmp_path_factory.mktemp("cache"), patch).plan()


@pytest.fixture
def file(plan: Plan, tmp_path: Path) -> str:
    return saved(plan, tmp_path / "plan.json")


def test_a_named_plan_of_other_models_is_an_error(world: PlanEnvironment, file: str, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", num_hidden_layers=LAYERS, seed=9)
    with pytest.raises(PlanError, match=r"made for .*target.*offspec plan"):
        world.load(model=other, plan=file)
    with pytest.raises(PlanError, match=r"for the draft .*near.*offspec plan"):
        world.load(draft=str(other), plan=file)
    with pytest.raises(PlanError, match=r"nowhere\.json"):
        world.load(plan=tmp_path / "nowhere.json")
    assert world.measured == 0


def test_a_named_plan_brings_its_own_settings(world: PlanEnvironment, tmp_path: Path) -> None:
    """Draft, context, memory and data type are the plan's unless the caller sets them."""
    plan = world.plan(draft=str(world.near), draft_bits=4, memory="2GB", context=96, temperature=0.6)
    for given in (saved(plan, tmp_path / "plan.json"), plan):
        with offspec.load(str(world.target), plan=given, notify=world.notify) as engine:
            assert engine.plan == plan and engine.context == 96
            assert engine.placement["memory"] == 2_000_000_000
            assert (engine.config.temperature, engine.config.dtype) == (0.6, "float32")
            assert engine.draft == "near (4-bit)"
    assert (world.measured, world.notices) == (1, [])


def test_the_bits_of_keys_and_values_are_the_plans(world: PlanEnvironment, file: str, tmp_path: Path) -> None:
    plan = world.plan(kv_cache="int8")
    assert plan.kv_cache == "int8"
    with world.load(plan=saved(plan, tmp_path / "int8.json")) as engine:
        assert engine.config.kv_cache == engine.placement["kv_cache"] == "int8"
    with pytest.raises(PlanError, match="kv_cache model, not int8: leave out `kv_cache`"):
        world.load(plan=file, kv_cache="int8")


def test_the_format_of_the_target_is_the_plans(
    world: PlanEnvironment, plan: Plan, file: str, tmp_path: Path
) -> None:
    assert plan.quantize is None
    with pytest.raises(UnsupportedModelError, match="cannot be packed"):  # its matrices are too small
        world.load(plan=saved(replace(plan, quantize="int8"), tmp_path / "int8.json"))
    with pytest.raises(PlanError, match="quantize none, not nf4: leave out `quantize`"):
        world.load(plan=file, quantize="nf4")


@pytest.mark.exhaustive
def test_the_bits_of_the_draft_are_the_plans(world: PlanEnvironment, tmp_path: Path) -> None:
    plan = world.plan(draft_bits=3)
    assert (plan.draft_mode, plan.draft_bits) == ("expanded", 3)
    file = saved(plan, tmp_path / "plan.json")
    for bits in (None, 3):
        with world.load(plan=file, draft_bits=bits) as engine:
            assert (engine.plan, engine.draft) == (plan, "near (3-bit)")
    with pytest.raises(PlanError, match="draft_bits 3, not 4: leave out `draft_bits`"):
        world.load(plan=file, draft_bits=4)
    mine = world.plan(draft="auto")
    assert mine.draft_bits == 4, "the most that fit"
    two = saved(mine, tmp_path / "mine.json", draft_mode="packed", draft_bits=2)
    with world.load(draft="auto", plan=two) as engine:
        assert engine.draft == "self (2-bit) + suffix"
        answer = engine.generate(PROMPT, GREEDY)
        assert list(answer.token_ids) == reference(world.target, PROMPT, TOKENS)
    assert (world.measured, world.notices) == (2, [])


def test_the_caller_s_settings_precede_the_plan(world: PlanEnvironment, file: str) -> None:
    for budget in (5, 300):
        with world.load(plan=file, budget=budget, width=2, context=64, memory="2GB") as engine:
            assert (engine.budget, engine.width, engine.context) == (budget, 2, 64)
            assert engine.placement["memory"] == 2 * GB
    assert (world.measured, world.notices) == (0, [])
    assert world.plan(plan=file, replan=True).budget > 1 and world.measured == 1


def test_settings_that_conflict_with_the_plan(world: PlanEnvironment, file: str, tmp_path: Path) -> None:
    static = saved(world.plan(tree="sequoia"), tmp_path / "static.json")
    assert world.followed(plan=static).tree == "sequoia"
    with pytest.raises(PlanError, match="tree dynamic, not sequoia: leave out `tree`"):
        world.load(plan=file, tree="sequoia")
    with pytest.raises(PlanError, match="device cpu, not cuda:0: leave out `device`"):
        world.load(plan=file, device="cuda")
    with pytest.raises(RequestError, match="10000 exceeds the model's limit of 512 tokens"):
        world.load(
            plan=saved(world.followed(plan=file), tmp_path / "long.json", context=10_000), context=None
        )


@pytest.mark.exhaustive
@pytest.mark.usefixtures("drafters_stay")
def test_a_named_plan_ignores_saved_measurements(world: PlanEnvironment, tmp_path: Path) -> None:
    """New measurements of the draft would remake a saved plan; a named plan is followed unchanged."""
    plan = world.plan()
    file = saved(plan, tmp_path / "plan.json")
    world.learn()
    assert world.followed(plan=file) == plan
    world.remade("the draft's acceptance rate is now measured")


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
def test_an_edited_plan_is_followed(
    world: PlanEnvironment, plan: Plan, tmp_path: Path, changes: dict[str, Any]
) -> None:
    with world.load(plan=saved(plan, tmp_path / "plan.json", **changes)) as engine:
        assert (world.notices, world.measured) == ([], 0)
        assert engine.budget == changes.get("budget", plan.budget)
        assert engine.width == changes.get("width", plan.width)
        answer = engine.generate(PROMPT, GREEDY)
        assert list(answer.token_ids) == reference(world.target, PROMPT, TOKENS)
        assert (answer.bytes_streamed > 0) == ("placement" in changes)


def test_an_edited_plan_that_does_not_fit_is_remade(world: PlanEnvironment, tmp_path: Path) -> None:
    plan = world.plan(memory="2GB")
    rest = {"head": "device", "staging": 0}
    for changes in (
        {"budget": 10_000_000},
        {"placement": {"tiers": "4 device", "slots": 0, **rest}},
        {"placement": {"tiers": "5 disk", "slots": 1_000_000_000, **rest}},
    ):
        file = saved(plan, tmp_path / "plan.json", **changes)
        assert world.remade("does not fit in 2.00 GB", plan=file).to_json() == plan.to_json()


def test_a_plan_may_leave_the_draft_out(world: PlanEnvironment, plan: Plan, tmp_path: Path) -> None:
    with world.load(plan=saved(plan, tmp_path / "plan.json", draft_mode="none", draft_bits=16)) as engine:
        assert engine.draft == "none"
    assert ["without the draft model" in text for text in world.notices] == [True]


def test_a_head_shared_by_a_self_draft_cannot_stream(world: PlanEnvironment, tmp_path: Path) -> None:
    file = saved(world.plan(draft="auto"), tmp_path / "plan.json", placement=HEAD_TOO)
    assert world.remade("does not fit", plan=file, draft="auto").placement.head is Tier.DEVICE
