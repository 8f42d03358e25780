"""What a plan says of itself: the right reasons, with figures and units."""

from dataclasses import replace

from offspec_planners.placement import Placement, Tier
from offspec_planners.plan import Part, Plan
from offspec_planners.plan.explain import (
    explain,
    explain_bound,
    explain_first_token,
    explain_placement,
    explain_tree,
)
from offspec_planners.units import format_number, format_seconds
from tests.support.sample_plans import COSTS, forecast, large, small


def resident() -> Plan:
    """Everything stays in memory."""
    costs = replace(COSTS, link=0.0, rest=0.0, edge=((1, 0.0),))
    return replace(
        small(),
        placement=Placement((Tier.DEVICE,) * 30, 0),
        parts=(Part("layers", "device", 3_390_000_000),),
        costs=costs,
        forecast=forecast(costs, 0.14, 256, 9.8, ttft_s=0.6, prompt_tokens=128),
    )


def test_all_of_it_in_order() -> None:
    plan = large()
    text = " ".join(explain(plan))
    assert text.startswith("Of 80 layers 5 stay in VRAM, 25 wait in RAM and 50 come from disk, spread evenly")
    assert "85.60 GB from disk at 6.50 GB/s and 130.50 GB from RAM to VRAM at 24.80 GB/s" in text
    assert "Rings of 3 slots in VRAM and 3 in RAM" in text
    assert "the output head last: 13.2 s on the slower of the two" in text
    assert "1.64 GB of RAM and 6.40 GB of VRAM" in text
    assert "yields 18.4 tokens (typical of a small model, not measured)" in text


def test_nothing_moves_where_all_stays() -> None:
    text = " ".join(explain_placement(resident()))
    assert text.startswith("All 30 layers stay in RAM. No weights move while it decodes.")
    assert "slots" not in text and "disk" not in text


def test_nodes_that_cost_no_time() -> None:
    text = " ".join(explain_tree(small()))
    assert "Up to 184 nodes compute while the link is busy" in text
    assert "128 nodes would give" in text and "512 nodes would give" in text and "1,024" not in text
    assert "up to 4,096 nodes at least" in " ".join(explain_tree(large()))
    assert "link" not in " ".join(explain_tree(resident()))


def test_without_a_draft() -> None:
    alone = replace(small(), draft="none", draft_mode="none", budget=1)
    assert explain_tree(alone) == ("There is no draft, so every pass yields one token.",)
    (copied,) = explain_tree(replace(alone, draft="suffix", budget=64))
    assert "one token, and more where the text repeats" in copied


def test_each_bound_has_its_reason() -> None:
    plan = resident()
    assert plan.forecast.bound == "compute"
    words = "Compute bounds a pass: 0.840 s, after 0.140 s of drafting, with nothing to stream."
    assert explain_bound(plan) == words
    slow = replace(plan, forecast=replace(plan.forecast, bound="draft", draft_seconds=2.0))
    assert explain_bound(slow).startswith("The draft bounds a pass: 2.00 s, before 0.840 s of computing")
    assert "in which 0.500 s of drafting and 1.20 s of computing fit" in explain_bound(large())
    assert "slots hold 0.160 s ahead while the draft works for 0.140 s" in explain_bound(small())


def test_the_first_token() -> None:
    assert "one trip of the weights, which takes 1.29 s" in explain_first_token(small())
    late = replace(small(), forecast=replace(small().forecast, ttft_s=9.0))
    assert "longer than the one trip of the weights, 1.29 s" in explain_first_token(late)
    assert explain_first_token(resident()) == "it is bound by compute"


def test_figures() -> None:
    numbers = (0.0, 0.02134, 0.9996, 1.6, 24.84, 99.96, 912.4, 1940.0, -2.5, float("inf"))
    shown = ["0", "0.0213", "1.00", "1.60", "24.8", "100", "912", "1,940", "-2.50", "inf"]
    assert [format_number(number) for number in numbers] == shown
    seconds = (0.0, 0.0213, 0.1, 1.6, 119.0, 150.0, 7260.0)
    assert [format_seconds(span) for span in seconds] == [
        *("0 s", "21.3 ms", "0.100 s", "1.60 s", "119 s", "2 min", "2 h 01 min")
    ]
