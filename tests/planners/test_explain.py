"""Sentences that explain a plan: the right reasons, with figures and units."""

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
    """Everything is resident."""
    costs = replace(COSTS, link=0.0, rest=0.0, edge=((1, 0.0),))
    return replace(
        small(),
        placement=Placement((Tier.DEVICE,) * 30, 0),
        parts=(Part("layers", "device", 3_390_000_000),),
        costs=costs,
        forecast=forecast(costs, 0.14, 256, 9.8, ttft_s=0.6, prompt_tokens=128),
    )


def test_each_part_gives_its_reasons() -> None:
    alone = replace(small(), draft="none", draft_mode="none", budget=1)
    slow = replace(resident(), forecast=replace(resident().forecast, bound="draft", draft_seconds=2.0))
    late = replace(small(), forecast=replace(small().forecast, ttft_s=9.0))
    for lines, words in (
        (
            explain(large()),
            "Of 80 layers, 5 stay in VRAM, 25 are copied from RAM and 50 are read from disk, spread evenly",
        ),
        (explain(large()), "85.60 GB from disk at 6.50 GB/s and 130.50 GB from RAM to VRAM at 24.80 GB/s"),
        (explain(large()), "Streaming buffers of 3 slots in VRAM and 3 in RAM"),
        (explain(large()), "the output head last: 13.2 s on the slower link"),
        (explain(large()), "1.64 GB of RAM and 6.40 GB of VRAM"),
        (explain(large()), "yields 18.4 tokens (typical of a small model, not measured)"),
        (explain_placement(resident()), "All 30 layers stay in RAM. No weights move during decoding."),
        (explain_tree(small()), "Up to 184 nodes compute while the link is busy"),
        (explain_tree(small()), "128 nodes would give"),
        (explain_tree(small()), "512 nodes would give"),
        (explain_tree(large()), "Trees of at least 4,096 nodes"),
        (explain_tree(alone), "Without a draft, every pass yields one token."),
        (explain_tree(replace(alone, draft="suffix", budget=64)), "and more in repetitive text"),
        (
            [explain_bound(resident())],
            "Compute-bound: 0.840 s of computing after 0.140 s of drafting, with nothing",
        ),
        ([explain_bound(slow)], "Draft-bound: 2.00 s of drafting before 0.840 s of computing"),
        ([explain_bound(large())], "which overlaps 0.500 s of drafting and 1.20 s of computing"),
        ([explain_bound(small())], "0.160 s overlaps drafting (0.140 s)"),
        ([explain_first_token(small())], "processed in one weight transfer of 1.29 s"),
        ([explain_first_token(late)], "longer than the one weight transfer of 1.29 s"),
        ([explain_first_token(resident())], "compute-bound"),
    ):
        assert words in " ".join(lines)
    assert "slot" not in " ".join(explain_placement(resident()))
    assert "link" not in " ".join(explain_tree(resident())) and "1,024" not in " ".join(explain_tree(small()))


def test_figures() -> None:
    numbers = (0.0, 0.02134, 0.9996, 1.6, 24.84, 99.96, 912.4, 1940.0, -2.5, float("inf"))
    shown = ["0", "0.0213", "1.00", "1.60", "24.8", "100", "912", "1,940", "-2.50", "inf"]
    assert [format_number(number) for number in numbers] == shown
    seconds = (0.0, 0.0213, 0.1, 1.6, 119.0, 150.0, 7260.0)
    assert [format_seconds(span) for span in seconds] == [
        *("0 s", "21.3 ms", "0.100 s", "1.60 s", "119 s", "2 min", "2 h 01 min")
    ]
