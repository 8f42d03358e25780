"""On-demand experts: their number per pass, their cost, and learned estimates of both."""

import json
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from offspec_planners.acceptance import typical
from offspec_planners.cost import Estimate, ModelSizes, PassCosts, expert_layer_seconds
from offspec_planners.expert_costs import ExpertCosts, ExpertPass, ExpertSizes, ExpertUse
from offspec_planners.hardware_rates import Rate, preset
from offspec_planners.measured_costs import MeasuredCosts
from offspec_planners.placement import Placement, Tier
from offspec_planners.search import best, forecast_speed, sweep
from offspec_planners.tree_growth import best_size
from offspec_planners.typical_acceptance import HEAD, MODEL, TypicalDraft

GB = 10**9
_ROWS = (1, 2, 4, 8, 16, 32, 64)
_BUDGETS = (1, 16, 64, 256)


def _routed(
    random: np.random.Generator, experts: int, chosen: int, rows: int, skew: float, alike: float
) -> NDArray[np.int64]:
    """Choices of rows [rows, chosen]: some experts more often, often those of the previous row."""
    liked = skew * np.log(1.0 / np.arange(1, experts + 1))
    noise, found = random.gumbel(size=experts), []
    for _ in range(rows):
        noise = np.where(random.random(experts) < alike, noise, random.gumbel(size=experts))
        found.append(np.argsort(-(liked + noise))[:chosen])
    return np.array(found)


def _costs(
    seconds: float = 1e-3, share: float = 0.3, compute: float = 0.02, count: int = 128, chosen: int = 8
) -> PassCosts:
    """Costs of 48 layers of experts, each of which takes this many seconds to load."""
    experts = ExpertCosts(48, count, chosen, ((share, seconds),))
    steps = ((1, 0.01), (64, 0.012))
    return PassCosts(((1, compute), (1024, 5 * compute)), steps, experts=experts)


def test_missed_experts_add_to_a_pass() -> None:
    costs = _costs()
    asked = 48 * 128 * (1 - (1 - 8 / 128) ** 16)
    assert float(costs.pass_seconds(16)) == pytest.approx(
        float(costs.compute_seconds(16)) + asked * 0.7 * 1e-3
    )
    everything = _costs(share=1.0)
    assert np.array_equal(everything.pass_seconds(_ROWS), everything.compute_seconds(_ROWS))


def test_expert_loads_overlap_with_computation_and_share_the_link() -> None:
    beside = ExpertCosts(10, 8, 2, ((0.5, 0.01),), compute=((1, 0.04), (8, 0.04)))
    come = 10 * 2 * 0.5 * 0.01
    assert float(beside.wait_seconds(1)) == pytest.approx(come - 0.04)
    assert float(replace(beside, compute=((1, 1.0),)).wait_seconds(1)) == 0.0
    costs = PassCosts(((1, 0.05),), ((1, 0.0),), link=1.0, rest=0.3, edge=((1, 0.02),), experts=beside)
    assert float(costs.pass_seconds(1)) == pytest.approx(0.3 + 0.02 + come)
    assert float(costs.iteration(0.0, 1)) == pytest.approx(1.0 + come)


def test_slowest_of_several_links_determines_the_time() -> None:
    near, far = (0.2, 0.001), (0.6, 0.01)
    both = ExpertCosts(10, 8, 2, (near, far))
    assert float(both.link_seconds(1)) == pytest.approx(max(20 * 0.8 * 0.001, 20 * 0.4 * 0.01))
    # Other copies to a device do not delay the disk.
    assert float(both.link_seconds(1, 0.05)) == pytest.approx(20 * 0.4 * 0.01)
    assert float(both.link_seconds(1, 0.2)) == pytest.approx(0.2 + 20 * 0.8 * 0.001)


@pytest.mark.parametrize(("kind", "seconds", "count"), [(MODEL, 1e-3, 8), (HEAD, 1e-4, 128)])
def test_trees_chosen_by_cost_are_never_slower_than_none(
    kind: TypicalDraft, seconds: float, count: int
) -> None:
    known = typical(kind)
    costs = _costs(seconds, count=count, chosen=4 if count == 128 else 2)
    chosen = best(sweep(known, costs, _BUDGETS, (8,))).choice
    alone = forecast_speed(known, costs, 1, 1).choice
    assert chosen.tok_per_s >= 0.995 * alone.tok_per_s


def test_slow_speculation_is_omitted() -> None:
    """If a second row nearly doubles the bytes, a draft that is seldom right only costs time."""
    known = typical(HEAD)
    assert best(sweep(known, _costs(0.0, compute=0.5), _BUDGETS, (16,))).choice.budget > 1
    dear = _costs(1e-2, share=0.0, compute=0.5)
    assert best(sweep(known, dear, _BUDGETS, (16,))).choice.budget == 1
    scores = np.sort(np.log(np.concatenate([[1.0], np.random.default_rng(1).random(60)])))[::-1]
    for costs in (dear, _costs(1e-5), _costs(1e-3)):
        rates = [np.exp(scores[:rows]).sum() / float(costs.iteration(0.02, rows)) for rows in range(1, 62)]
        assert best_size(scores, 0.02, costs) == 1 + int(np.argmax(rates)), "beside every number tried"


@pytest.mark.parametrize(("skew", "alike"), [(0.0, 0.0), (0.7, 0.5)])
def test_expert_counts_are_learned(skew: float, alike: float) -> None:
    """Routers of several kinds: from passes of some row counts, other row counts are predicted as well."""
    random = np.random.default_rng(7)
    experts, chosen, layers = 64, 4, 12

    def asked(rows: int) -> int:
        each = (_routed(random, experts, chosen, rows, skew, alike) for _ in range(layers))
        return sum(len(np.unique(found)) for found in each)

    use = ExpertUse(experts, chosen)
    for _ in range(16):
        for rows in (2, 8, 32):
            use.observe(ExpertPass(rows, layers, asked(rows), 0, 0))
    learnt = use.applied(ExpertCosts(layers, experts, chosen, ((0.3, 1.0),)))
    for rows in (1, 2, 4, 8, 16, 32):
        truth = np.mean([asked(rows) for _ in range(5)]) / layers
        assert float(learnt.distinct_experts(rows)) == pytest.approx(truth, rel=0.1)


def test_hit_rates_are_learned_for_all_memory_sizes() -> None:
    """A memory with the most used experts: its hits are about f^r with a single r."""
    liked = np.arange(1, 101) ** -0.8
    liked /= liked.sum()
    use, layers = ExpertUse(100, 4), 10
    for _ in range(40):
        hits = liked[:30].sum()
        use.observe(ExpertPass(1, layers, 4000, int(4000 * (1 - hits)), 30 * layers))
    for held in (20, 30, 45):
        learnt = use.applied(ExpertCosts(layers, 100, 4, ((held / 100, 1.0),)))
        assert float(learnt.hit_rate(1)) == pytest.approx(liked[:held].sum(), abs=0.06)


def test_learned_values_are_saved() -> None:
    use = ExpertUse(64, 4)
    before = use.to_json()
    use.observe(ExpertPass(4, 5, 0, 0, 0))
    assert use.to_json() == before, "a pass that says nothing changes nothing"
    for rows in (1, 4, 16):
        use.observe(ExpertPass(rows, 6, 6 * 4 * max(rows // 2, 1), 30, 100))
    again = ExpertUse(64, 4)
    again.restore(json.loads(json.dumps(use.to_json())))
    costs = ExpertCosts(6, 64, 4, ((0.3, 1.0),))
    assert again.passes == 3
    assert np.allclose(
        again.applied(costs).link_seconds(_ROWS), use.applied(costs).link_seconds(_ROWS), rtol=1e-3
    )
    for wrong in (
        {},
        {**use.to_json(), "passes": -1},
        {**use.to_json(), "spread": {"weight": [], "mean": []}},
        {**use.to_json(), "spread": {"weight": [-1.0] * 12, "mean": [0.0] * 12}},
        {**use.to_json(), "reuse": {"weight": [1.0] * 12, "mean": [800.0] * 12}},  # from no model
    ):
        with pytest.raises(ValueError):
            again.restore(wrong)


def _mixture(count: int = 128, chosen: int = 8) -> ModelSizes:
    """48 layers with 128 experts of 4.7 million weights: about Qwen3-30B-A3B."""
    experts = ExpertSizes(count, chosen, tuple(range(48)), 9_437_184, 4_718_592)
    dense = 40_000_000
    return ModelSizes(
        "mixture",
        (2 * dense + experts.layer_bytes,) * 48,
        dense + chosen * experts.weights,
        600 * 10**6,
        300 * 10**6,
        98_304,
        32_768,
        2048,
        151_936,
        experts=experts,
    )


def test_profile_gives_costs_of_on_demand_experts() -> None:
    sizes = _mixture()
    assert sizes.dense_layers == (80_000_000,) * 48 and sizes.dense_weights == 40_000_000
    machine = preset("rtx-4090")
    whole = Placement((Tier.HOST,) * 48, 3)
    needed = Placement((Tier.DEVICE,) * 48, 0, expert_slots=1500, host_expert_slots=3000)
    by_need = Estimate(machine, None).costs(sizes, needed, 1.0)
    streamed = Estimate(machine, None).costs(sizes, whole, 1.0)
    assert streamed.experts is None and by_need.link == 0.0 and by_need.experts is not None
    assert by_need.experts.sources[0][0] == pytest.approx(1500 / (48 * 128))
    assert machine.link is not None
    assert by_need.experts.sources == (
        (1500 / 6144, sizes.experts.nbytes / machine.link.value),  # type: ignore[union-attr]
        (3000 / 6144, sizes.experts.nbytes / machine.disk.value),  # type: ignore[union-attr]
    )
    assert float(by_need.iteration(0.0, 1)) < float(streamed.iteration(0.0, 1)) / 4


def test_cpu_experts_cost_only_computation() -> None:
    machine, sizes = preset("rtx-4090"), _mixture()
    near = Placement((Tier.DEVICE,) * 48, 0, expert_slots=1500, host_expert_slots=6144)
    beside = replace(near, expert_slots=0)
    assert machine.host is not None and sizes.experts is not None
    assert (near.cpu_experts, beside.cpu_experts, beside.on_demand_experts) == (False, True, True)

    def costs(placement: Placement, host: float) -> PassCosts:
        rates = replace(machine.host, bandwidth=Rate.exactly(host))  # type: ignore[type-var]
        return Estimate(replace(machine, host=rates), None).costs(sizes, placement, 1.0)

    fast, slow = costs(beside, 8e10), costs(beside, 1e10)
    assert fast.experts is not None
    assert fast.experts.sources == ((1.0, sizes.experts.nbytes / machine.disk.value),)
    assert float(fast.link_seconds(1)) == 0.0
    each = 2.0 * sizes.experts.weights * sizes.experts.chosen * 48  # bytes of the choices of one row
    more = float(slow.compute_seconds(1) - fast.compute_seconds(1))
    assert more == pytest.approx(each / 1e10 - each / 8e10, rel=1e-6)
    copied = costs(near, 8e10)
    assert float(fast.iteration(0.0, 1)) < float(copied.iteration(0.0, 1)) < float(slow.iteration(0.0, 1))
    some = replace(beside, host_expert_slots=3072)
    assert costs(some, 8e10).experts.sources == ((0.5, sizes.experts.nbytes / machine.disk.value),)  # type: ignore[union-attr]


def test_gpu_measurements_predict_cpu_experts() -> None:
    """Derived from a layer's time without its experts and the CPU's profile; as measured if it ran there."""
    machine, sizes = preset("rtx-4090"), _mixture()
    near = Placement((Tier.DEVICE,) * 48, 0, expert_slots=1500, host_expert_slots=6144)
    beside = replace(near, expert_slots=0)
    rates = {"link": Rate.exactly(2e10), "disk": Rate.exactly(5e9), "copy": Rate.exactly(2e10)}
    points = ((1, 2e-3), (64, 5e-3))
    measured = MeasuredCosts(points, ((1, 1e-3), (64, 1e-3)), 1e-4, host=machine.host, **rates)
    assert sizes.experts is not None and machine.host is not None
    moved = measured.costs(sizes, beside, 1.0)
    met = sizes.experts.chosen * sizes.experts.weights
    dense = 48 * 2e-3 * sizes.dense_weights / (sizes.dense_weights + met)
    told = 48 * expert_layer_seconds(machine.host, sizes, 1, machine.host)
    assert float(moved.compute_seconds(1)) == pytest.approx(dense + told + 1e-3 + 1e-4)
    assert moved.experts is not None and moved.experts.compute[0][1] == pytest.approx(told)
    ran = replace(measured, cpu_experts=True).costs(sizes, beside, 1.0)
    assert ran.compute == measured.costs(sizes, near, 1.0).compute


def test_bytes_multiplied_by_a_moe_model_grow_with_the_rows() -> None:
    """With one row the chosen experts are read from memory, with many rows all of them."""
    sizes, machine = _mixture(), preset("rtx-4090")
    placement = Placement((Tier.DEVICE,) * 48, 0)
    compute = Estimate(machine, None).costs(sizes, placement, 1.0).compute_seconds([1, 16, 1024])
    bytes_at = [48 * (80e6 + 9_437_184 * float(sizes.experts.distinct_experts(rows))) for rows in (1, 16)]  # type: ignore[union-attr]
    extra = (bytes_at[1] - bytes_at[0]) / machine.processor.bandwidth.value
    assert compute[1] - compute[0] == pytest.approx(extra, rel=0.1)
    assert compute[2] > 2 * compute[1]
