"""Plans and their files: what is written is read again, and what was damaged is named."""

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offspec_planners.cost import PassCosts
from offspec_planners.experts import ExpertCosts
from offspec_planners.placement import Placement, Tier
from offspec_planners.plan import Choice, Comparison, Forecast, Part, Plan, Validation, WhatIf
from offspec_planners.plan.forecast import BOUNDS, best_by_budget
from tests.support.sample_plans import large, several, small, validation

Path = tuple[str | int, ...]

_numbers = st.floats(0, 1e12)
_above = st.floats(1e-9, 1e12)
_whole = st.integers(0, 2**40)
_count = st.integers(1, 2**40)


@st.composite
def curves(draw: st.DrawFn) -> tuple[tuple[int, float], ...]:
    xs = draw(st.lists(st.integers(1, 10**6), min_size=1, max_size=5, unique=True))
    return tuple((x, draw(_numbers)) for x in sorted(xs))


@st.composite
def placements(draw: st.DrawFn, apart: bool) -> Placement:
    kinds = list(Tier) if apart else [Tier.DEVICE, Tier.DISK]
    tiers = tuple(draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=40)))
    head = draw(st.sampled_from([kind for kind in kinds if kind is not Tier.CPU]))
    used = {*tiers, head}
    slots = draw(st.integers(1, 4)) if any(tier.streams for tier in used) else 0
    staging = draw(st.integers(2, 4)) if apart and Tier.DISK in used else 0
    return Placement(tiers, slots, staging, head)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    apart = draw(st.booleans())
    tiers = st.sampled_from([tier.value for tier in Tier])
    mode = draw(st.sampled_from(["full", "expanded", "packed", "none"]))
    return replace(
        large() if apart else small(),
        target=draw(st.text()),
        memory=draw(_count),
        vram=draw(_count) if apart else None,
        device=draw(st.sampled_from(["cuda", "cuda:1"])) if apart else "cpu",
        temperature=draw(_numbers),
        draft_mode=mode,
        draft_bits=draw(st.sampled_from([2, 3, 4])) if mode in ("expanded", "packed") else 16,
        tree=draw(st.sampled_from(["dynamic", "sequoia"])),
        parts=tuple(draw(st.lists(st.builds(Part, st.text(), tiers, _whole), max_size=4))),
        placement=draw(placements(apart)),
        costs=draw(st.builds(PassCosts, curves(), curves(), _numbers, _numbers, _numbers, curves())),
        forecast=draw(
            st.builds(
                Forecast,
                *(_numbers, _count, _above, _above, _above, _numbers, _numbers, _numbers),
                st.sampled_from(BOUNDS),
            )
        ),
        sweep=tuple(draw(st.lists(st.builds(Choice, _count, _count, _above, _above, _above), max_size=3))),
        what_ifs=tuple(
            draw(st.lists(st.builds(WhatIf, st.text(), st.none() | _numbers, st.text()), max_size=3))
        ),
        notes=tuple(draw(st.lists(st.text(), max_size=3))),
    )


@given(plans())
def test_what_is_written_is_read_again(plan: Plan) -> None:
    assert Plan.from_text(plan.to_text()) == plan
    assert Plan.from_json(json.loads(json.dumps(plan.to_json(), allow_nan=False))) == plan


def test_a_file_is_for_people() -> None:
    text = small().to_text()
    assert text.startswith('{\n "offspec_plan": 2,\n "target": ')
    assert '"tiers": "2 disk, 1 device, 4 disk, 1 device' in text
    assert len(text.splitlines()) <= 102


def test_tiers_may_be_written_more_loosely() -> None:
    value = small().to_json()
    value["placement"]["tiers"] = "1 disk,1 disk ,  28 device"
    tiers = Plan.from_json(value).placement.tiers
    assert tiers == (Tier.DISK,) * 2 + (Tier.DEVICE,) * 28


def places(value: Any, path: Path = ()) -> Iterator[Path]:
    """Every place in a JSON value, but for the insides of the hardware, which are tested with it."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, item in value.items():
            if path != ("hardware",):
                yield from places(item, (*path, key))
    if isinstance(value, list):
        for index, item in enumerate(value[:1]):
            yield from places(item, (*path, index))


def holder(value: Any, path: Path) -> Any:
    for key in path[:-1]:
        value = value[key]
    return value


def key_of(path: Path) -> str:
    """The last name on a path: what a complaint must at least mention."""
    return next(str(key) for key in reversed(path) if isinstance(key, str))


def wrong_for(value: Any) -> tuple[object, ...]:
    """What must not stand where a value of this type stands."""
    if isinstance(value, str):
        return 5, None, [], {}
    if isinstance(value, list):
        return 5, None, "?", {"a": 1}, [5]
    if isinstance(value, dict):
        return 5, None, "?", [], {}, {"a": 1}
    if isinstance(value, bool):
        return 5, None, "?", [], {}
    return "?", True, -1, -0.5, float("nan"), float("inf"), 10**400, [], {}


PLACES = {
    f"{plan['device']}:{'.'.join(map(str, path))}": (plan, path)
    for plan in (small().to_json(), large().to_json())
    for path in places(plan)
}


@pytest.mark.parametrize("place", PLACES)
def test_every_damaged_value_is_named(place: str) -> None:
    plan, path = PLACES[place]
    for wrong in wrong_for(holder(plan, path)[path[-1]]):
        damaged = copy.deepcopy(plan)
        holder(damaged, path)[path[-1]] = wrong
        with pytest.raises(ValueError) as caught:
            Plan.from_json(damaged)
        assert key_of(path) in str(caught.value)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize("key", ["device", "dtype", "tree", "draft_mode"])
def test_a_word_with_a_line_break_is_another_word(key: str) -> None:
    plan = small().to_json()
    with pytest.raises(ValueError, match=rf"^{key} is .*; it should be"):
        Plan.from_json(plan | {key: plan[key] + "\n"})


def test_half_of_a_character_is_named_by_its_key() -> None:
    plan = small().to_json()
    with pytest.raises(ValueError, match=r"^forecast.tok_per_s is .*ud800.*; it should be"):
        Plan.from_json(plan | {"forecast": plan["forecast"] | {"tok_per_s": "\ud800"}})


KEYS = [name for name, (_, path) in PLACES.items() if isinstance(path[-1], str)]


@pytest.mark.parametrize("place", [name for name in KEYS if not name.endswith(":measured")])
def test_every_missing_key_is_named(place: str) -> None:
    plan, path = PLACES[place]
    damaged = copy.deepcopy(plan)
    del holder(damaged, path)[path[-1]]
    with pytest.raises(ValueError, match=str(path[-1])):
        Plan.from_json(damaged)


def test_a_plan_that_does_not_say_whether_its_draft_was_measured() -> None:
    earlier = small().to_json()
    del earlier["measured"]
    assert Plan.from_json(earlier) == replace(small(), measured=False)


@pytest.mark.parametrize("path", [(), ("placement",), ("costs",), ("forecast",), ("sweep", 0), ("parts", 0)])
def test_an_unknown_key_is_named(path: Path) -> None:
    damaged = small().to_json()
    holder(damaged, (*path, "colour"))["colour"] = "red"
    with pytest.raises(ValueError, match="colour is not known here"):
        Plan.from_json(damaged)


@pytest.mark.parametrize(
    ("path", "wrong", "said"),
    [
        (("placement", "tiers"), "5 disk, 1 tape", "placement.tiers"),
        (("placement", "tiers"), "0 disk", "placement.tiers"),
        (("placement", "tiers"), "99999 disk", "placement.tiers"),
        (("placement", "tiers"), "٣ disk", "placement.tiers"),
        (("placement", "tiers"), "", "placement.tiers"),
        (("placement", "tiers"), "15 disk, 15 host", "a CPU computes in RAM"),
        (("placement", "head"), "host", "a CPU computes in RAM"),
        (("placement", "slots"), 0, "above 0 where anything streams"),
        (("placement", "tiers"), "30 device", "0 where all is on the device"),
        (("placement", "staging"), 3, "placement.staging is 3"),
        (("device",), "tpu", '"cpu" or "cuda"'),
        (("device",), "cuda", "vram is null"),
        (("vram",), 10**9, "the device is a CPU"),
        (("costs", "compute"), [[4, 1.0], [2, 2.0]], "ascending"),
        (("costs", "compute"), [[0, 1.0]], "costs.compute"),
        (("costs", "step"), [], "costs.step"),
        (("forecast", "bound"), "weather", '"link", "compute", "draft"'),
        (("sweep", 0, "tok_per_s"), "fast", r'sweep\[0\].tok_per_s is "fast"; it should be a number above 0'),
        (("budget",), 0, "budget is 0; it should be a whole number of 1 or more"),
        (("context",), 1, "context is 1"),
        (("hardware", "disk"), -1, "hardware: disk"),
    ],
)
def test_a_value_that_does_not_fit(path: Path, wrong: object, said: str) -> None:
    damaged = small().to_json()
    holder(damaged, path)[path[-1]] = wrong
    with pytest.raises(ValueError, match=said):
        Plan.from_json(damaged)


def test_disk_layers_of_a_card_need_staging() -> None:
    damaged = large().to_json()
    damaged["placement"]["staging"] = 0
    with pytest.raises(ValueError, match="staging is 0"):
        Plan.from_json(damaged)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "nested"),
        ("[]", "not a plan"),
        ('"plan"', "not a plan"),
        ('{"architectures": ["LlamaForCausalLM"]}', "not a plan"),
        ('{"offspec_plan": 3}', "offspec_plan is 3; this version of offspec reads up to 2"),
        ('{"offspec_plan": 1}', "offspec_plan is 1, of an earlier offspec; make one by `offspec plan`"),
        ('{"offspec_plan": 0}', "offspec_plan is 0"),
        ('{"offspec_plan": "1"}', "offspec_plan is"),
        ('{"offspec_plan": 2}', "is missing"),
    ],
)
def test_files_that_are_no_plans(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Plan.from_text(text)


def test_costs_are_written_whole() -> None:
    apart = {"experts", "caches"}
    assert small().to_json()["costs"].keys() == {field.name for field in fields(PassCosts)} - apart
    assert Plan.from_json(small().to_json()).costs == PassCosts(**asdict(small().costs))


def test_several_sequences_are_written_and_read() -> None:
    assert not {"sequences", "shared"} & small().to_json().keys()
    plan = replace(several(), costs=replace(several().costs, caches=0.25))
    assert Plan.from_text(plan.to_text()) == plan
    value = plan.to_json()
    assert (value["sequences"], value["costs"]["caches"]) == (8, 0.25)
    with pytest.raises(ValueError, match="sequences is 0; it should be a whole number of 1 or more"):
        Plan.from_json(value | {"sequences": 0})
    with pytest.raises(ValueError, match="budget is 7; it should be at least 8, a node of each sequence"):
        Plan.from_json(value | {"budget": 7})


def test_experts_by_need_are_written_and_read() -> None:
    experts = ExpertCosts(30, 8, 2, ((0.25, 0.01),), spread=((1, 0.9), (16, 0.8)))
    made = small()
    plan = replace(
        made,
        costs=replace(made.costs, experts=experts),
        placement=replace(made.placement, expert_slots=60),
    )
    assert Plan.from_text(plan.to_text()) == plan
    for path, wrong, said in (
        (("placement", "expert_slots"), 0, "placement.expert_slots is 0"),
        (("placement", "host_expert_slots"), 5, "placement.host_expert_slots is 5"),
        (("costs", "experts", "sources"), [[1.5, 0.01]], "costs.experts.sources"),
        (("costs", "experts", "spread"), [[16, 0.8], [1, 0.9]], "costs.experts.spread"),
        (("costs", "experts", "count"), 0, "costs.experts.count is 0"),
    ):
        damaged = plan.to_json()
        inner = damaged
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = wrong
        with pytest.raises(ValueError, match=re.escape(said)):
            Plan.from_json(damaged)


def test_bytes_that_stream() -> None:
    assert small().streamed(Tier.DISK) == 2_712_000_000
    assert large().streamed(Tier.DISK, Tier.HOST) == 85_600_000_000 + 42_800_000_000 + 2_100_000_000


def test_the_best_width_of_each_budget() -> None:
    choices = (Choice(64, 4, 1.0, 1, 1), Choice(16, 4, 3.0, 1, 1), Choice(64, 8, 2.0, 1, 1))
    assert best_by_budget(choices) == (choices[1], choices[2])


def test_medians_and_their_errors() -> None:
    found = validation()
    assert (found.seconds_per_pass.measured, found.tok_per_s.measured) == (1.38, 6.6)
    assert found.seconds_per_pass.error == pytest.approx(0.03 / 1.38)
    value = found.to_json()
    assert value["tok_per_s"] == {"predicted": 7.26, "measured": 6.6, "error": pytest.approx(0.1)}
    assert [row["prompt"] for row in value["rows"]] == [row.prompt for row in found.rows]
    assert value["rows"][0]["seconds_per_pass"]["error"] == pytest.approx(0.04 / 1.31)


def test_an_even_number_of_prompts() -> None:
    found = Validation(validation().rows[:2])
    assert found.seconds_per_pass == Comparison(1.35, pytest.approx(1.345))
