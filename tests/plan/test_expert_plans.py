"""On-demand experts from run to run: their use is learned and saved, and determines the cost of trees."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from offspec import CapacityError, PassStats, SamplingParams
from offspec.core import memory as process_memory
from offspec.core.events import ignore_event
from offspec.draft.grow.tree_grower import GrowthPolicy
from offspec.engine.engine import Engine
from offspec.model.devices import RUNTIME, SLACK
from offspec.plan import initial_fit, prepare
from offspec.plan.build_plan import plan_from_measurements
from offspec.plan.fit import nodes_without_draft
from offspec.plan.load import open_models
from offspec.plan.model_sizes import chosen_experts, expert_sizes
from offspec.plan.policy import DraftPolicy
from offspec.plan.prepare import draft_record
from offspec.plan.records import ExpertRecord
from offspec_planners.acceptance import typical
from offspec_planners.cost import PassCosts
from offspec_planners.expert_costs import ExpertCosts, ExpertPass, ExpertSizes
from offspec_planners.hardware_rates import Processor, Rate, preset
from offspec_planners.measured_costs import MeasuredCosts
from offspec_planners.typical_acceptance import SELF_DRAFT
from tests.support.exhaustive import sampled_params
from tests.support.expert_models import EXPERT_FAMILIES, write_experts
from tests.support.plan_fixtures import GB, MB, MEASURED, PlanEnvironment, least_memory
from tests.support.tiny_models import open_model

ANSWER = SamplingParams(max_tokens=24, ignore_eos=True)
# Repeated words, so that lookups find matches.
PROMPT = [5, 9, 17, 33, 5, 9, 17, 33, 5, 9, 17]
pytestmark = pytest.mark.usefixtures("drafters_stay")
_least = cache(least_memory)
SIZES = ExpertSizes(32, 2, (0, 1, 2), 1 << 20, 1 << 19)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of four layers of 32 experts, 25 MB of them."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 32, "num_experts_per_tok": 2}
    return write_experts(
        tmp_path_factory.mktemp("models") / "mixture", "qwen3_moe", num_hidden_layers=4, **sizes
    )


@pytest.fixture
def slow(plan_env: PlanEnvironment, mixture: Path, monkeypatch: pytest.MonkeyPatch) -> PlanEnvironment:
    """Return the MoE model on a machine whose disk is so slow that no second row pays."""
    plan_env.target = mixture
    measured = replace(MEASURED, link=None, disk=Rate.exactly(1e6), layer=((1, 1e-3), *MEASURED.layer))
    measured = replace(measured, outside=((1, 1e-3), *MEASURED.outside))

    def measure(*given: Any) -> MeasuredCosts:
        plan_env.measured += 1
        return measured

    monkeypatch.setattr(prepare, "measure", measure)
    return plan_env


def _load(plan_env: PlanEnvironment, **settings: Any) -> Engine:
    given = {"draft": "suffix", "memory": _least(plan_env.target) + 12 * MB}
    return plan_env.load(**(given | settings))


def _passes(engine: Engine, prompt: list[int] = PROMPT) -> list[PassStats]:
    return [event for event in engine.stream(prompt, ANSWER) if isinstance(event, PassStats)]


def test_lookup_tokens_are_verified_only_if_it_pays(slow: PlanEnvironment) -> None:
    """One token per pass with a slow disk; if experts take no time, the same answer in larger trees."""
    with _load(slow) as engine:
        _, *dear = _passes(engine)  # the first reads experts for the prompt, which later trees may reuse
        assert {done.tree_nodes for done in dear} == {1}
        policy = engine.drafting.policy
        costs = policy.growth.costs
        assert costs is not None and costs.experts is not None
        answer = engine.generate(PROMPT, ANSWER).token_ids
        engine.drafting.policy = replace(policy, growth=replace(policy.growth, costs=None))
        assert max(done.tree_nodes for done in _passes(engine)) > 1
        assert engine.generate(PROMPT, ANSWER).token_ids == answer


@pytest.mark.exhaustive
def test_slow_draft_is_dropped_for_cached_experts(slow: PlanEnvironment) -> None:
    memory = _least(slow.target) + 12 * MB
    settings: dict[str, Any] = {"draft": str(slow.near), "memory": memory, "learn": False}
    with _load(slow, **settings) as engine:  # it was loaded for the trial, and then loaded again
        plan, answer = engine.plan, engine.generate(PROMPT, ANSWER).token_ids
        assert plan is not None and plan.draft_mode == "none" and "left out" in plan.notes[-1]
        assert plan.placement.expert_slots == engine.placement["expert_slots"]
    with _load(slow, **settings) as engine:
        assert slow.measured == 1 and engine.plan == plan
        assert slow.notices == [
            "no draft, since using the memory of the draft model to cache experts is expected to be faster"
        ]
        assert engine.placement["expert_slots"] == plan.placement.expert_slots
        assert engine.generate(PROMPT, ANSWER).token_ids == answer
    with _load(slow, **settings, budget=16) as engine:  # given explicitly
        assert engine.plan is not None and engine.plan.draft_mode == "full"


@pytest.mark.exhaustive
@pytest.mark.gpu
def test_plan_chooses_the_device_of_experts(
    plan_env: PlanEnvironment, mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU if copying takes longer than its products, in float32; in bfloat16 a what-if shows it."""
    plan_env.target, host = mixture, preset("rtx-4090").host
    assert host is not None
    slow = replace(host, bandwidth=Rate.exactly(1e5))
    measured = replace(MEASURED, link=None, host=host, disk=Rate.exactly(1e9), copy=Rate.exactly(1e6))
    monkeypatch.setattr(prepare, "measure", lambda *given: measured)
    settings: dict[str, Any] = {"device": "cuda", "draft": "suffix", "memory": 4 * GB, "context": 48}
    with pytest.raises(CapacityError) as caught:
        plan_env.load(**settings, experts="gpu", vram=RUNTIME + SLACK)
    settings["vram"] = caught.value.needed + 2 * MB

    def planned(cpu: Processor, **others: Any) -> tuple[bool, bool]:
        """Return whether the CPU computes experts, and whether a notice says that it could."""
        opened = open_models(plan_env.config(**(settings | others)), ignore_event)
        rates, most = replace(measured, host=cpu), nodes_without_draft(opened)
        plan = plan_from_measurements(
            opened, replace(opened.config, budget=most), rates, draft_record(opened, 16)
        )
        opened.close()
        return plan.placement.cpu_experts, any("--experts cpu" in row.note for row in plan.what_ifs)

    assert planned(host) == (True, False) and planned(slow) == (False, False)
    assert planned(host, experts="gpu") == (False, True) == planned(host, dtype="bfloat16")
    assert planned(slow, experts="cpu") == (True, False)
    says, answer = set[tuple[int, ...]](), SamplingParams(max_tokens=3, ignore_eos=True)
    for cpu in (False, True):  # it is loaded for measurement, and then placed as planned
        with plan_env.load(**settings) as engine:
            result, placement = engine.generate(PROMPT, answer), engine.placement
            says.add(result.token_ids)
            assert result.cpu_experts == placement["cpu_experts"] == (placement["expert_slots"] == 0) == cpu
            assert placement["host_expert_slots"] == 128
    assert len(says) == 1


@pytest.mark.exhaustive
def test_expert_use_is_saved_for_later_runs(slow: PlanEnvironment) -> None:
    with _load(slow, learn=False) as engine:
        _passes(engine)
    assert not list(slow.cache.glob("expert_use/*"))
    with _load(slow) as engine:
        _passes(engine)
        record = engine.drafting.experts
        assert record is not None
        seen = record.use.passes
    assert len(list(slow.cache.glob("expert_use/*"))) == 1
    with _load(slow) as engine:
        record = engine.drafting.experts
        assert record is not None and record.use.passes == seen


@pytest.mark.exhaustive
def test_plan_is_renewed_once_expert_use_is_known(
    slow: PlanEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "_ENOUGH_PASSES", 20)
    memory = _least(slow.target) + 12 * MB

    def plan(**settings: Any) -> Any:
        with _load(slow, memory=memory, **settings) as engine:
            _passes(engine)
            return engine.plan

    first = plan()
    assert not first.costs.experts.learnt and slow.measured == 1
    second = plan()
    assert "the use of experts is now measured" in slow.notices[0] and slow.measured == 2
    assert second.costs.experts.learnt
    assert plan().costs == second.costs and slow.measured == 2 and slow.notices == []


def test_passes_without_expert_data_do_not_renew_a_plan(slow: PlanEnvironment) -> None:
    with _load(slow) as engine:
        record = engine.drafting.experts
        assert record is not None
        for _ in range(100):
            record.use.observe(ExpertPass(rows=1, layers=4, requested=8, missed=0, resident=128))
    with _load(slow):
        assert slow.measured == 1 and slow.notices == []


def test_more_memory_renews_a_plan_with_more_experts(
    slow: PlanEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initial_fit, "_MORE", 1.001)
    least = _least(slow.target)

    def free(more: int) -> None:
        monkeypatch.setattr(process_memory, "available_bytes", lambda: int((least + more) / 0.9))
        monkeypatch.setattr(process_memory, "resident_bytes", lambda: 0)

    free(8 * MB)
    tight = slow.plan(draft="suffix")
    assert tight.placement.expert_slots and not tight.placement.slots
    free(16 * MB)
    roomy = slow.expect_replan("are free now", draft="suffix")
    assert tight.placement.expert_slots < roomy.placement.expert_slots < 128


def _costs(seconds: float) -> PassCosts:
    experts = ExpertCosts(3, 4096, 2, ((0.2, seconds),))
    return PassCosts(((1, 0.5), (64, 0.6)), ((1, 0.01), (64, 0.02)), experts=experts)


def test_draft_is_paused_while_experts_make_its_trees_too_expensive() -> None:
    known = typical(SELF_DRAFT)
    policy = DraftPolicy(GrowthPolicy(64, 8, costs=_costs(1e-6)), planned_budget=64)
    dear = policy.with_costs(_costs(5.0), known)
    assert dear.growth.budget == 1 and dear.growth.costs == _costs(5.0)
    assert dear.with_costs(_costs(1e-6), known).growth.budget == 64
    assert (
        policy.with_costs(_costs(5.0), None).growth.budget == 64
    )  # lookups take no time: each tree has a cost


def test_fixed_shape_is_kept_for_any_expert_use(slow: PlanEnvironment) -> None:
    """It has no recorded trees, so its draft is not evaluated again; it is paused while it is slower."""
    memory = _least(slow.target) + 12 * MB
    settings: dict[str, Any] = {"draft": str(slow.near), "memory": memory, "tree": "sequoia", "budget": 8}
    with _load(slow, **settings) as engine:
        shape, passes = engine.drafting.policy.shape, list[PassStats]()
        assert shape is not None and engine.plan is not None and engine.plan.placement.on_demand_experts
        while len(passes) < 40:
            passes += _passes(engine)
        record, policy = engine.drafting.experts, engine.drafting.policy
        assert record is not None and record.use.passes >= 40 and engine.drafting.record is not None
        assert not engine.drafting.record.entry(0.0, True).forest
        assert policy.shape == shape and policy.growth.budget == 8
        assert policy.growth.costs is not None and policy.growth.costs.experts != engine.plan.costs.experts


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 1, "passes": "many"}'])
def test_damaged_record_is_ignored(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFSPEC_CACHE", str(tmp_path))
    record = ExpertRecord("target", SIZES)
    record.use.observe(ExpertPass(4, 3, 20, 8, 30))
    record.save()
    assert ExpertRecord("target", SIZES).use.passes == 1
    assert ExpertRecord("another", SIZES).use.passes == 0
    next(tmp_path.glob("expert_use/*")).write_text(text)
    assert ExpertRecord("target", SIZES).use.passes == 0


@pytest.mark.parametrize("family", sampled_params(EXPERT_FAMILIES, "qwen3_moe", "gpt_oss", "hunyuan_v1_moe"))
def test_expert_sizes_match_the_model(family: str, tmp_path: Path) -> None:
    model = open_model(write_experts(tmp_path, family))
    sizes, config = expert_sizes(model), model.skeleton.config
    assert sizes is not None
    named = getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_topk", None)
    assert sizes.chosen == (named[0] if isinstance(named, list) else named)
    assert 0 < 4 * sizes.weights <= sizes.nbytes
    for layer in sizes.layers:
        assert chosen_experts(model.skeleton.layers[layer], config) == sizes.chosen
