"""Plans and their files: round trips, and errors that name damaged values."""

import json
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from typing import Any

import pytest

from offspec_planners.cost import PassCosts
from offspec_planners.expert_costs import ExpertCosts
from offspec_planners.placement import Placement, Tier
from offspec_planners.plan import Plan
from offspec_planners.plan.forecast import Choice, Comparison, Validation, best_by_budget
from tests.support.sample_plans import large, several, small, validation

Path = tuple[str | int, ...]


def with_on_demand_experts() -> Plan:
    """Experts are loaded on demand."""
    experts = ExpertCosts(30, 8, 2, ((0.25, 0.01),), spread=((1, 0.9), (16, 0.8)))
    plan = small()
    return replace(
        plan,
        costs=replace(plan.costs, experts=experts),
        placement=replace(plan.placement, expert_slots=60),
    )


MADE: dict[str, Plan] = {
    "small": small(),
    "large": large(),
    "several": replace(several(), costs=replace(several().costs, caches=0.25)),
    "experts by need": with_on_demand_experts(),
    "experts on the CPU": replace(
        large(), placement=Placement((Tier.CPU, Tier.DEVICE, Tier.HOST), 2, 0, Tier.DEVICE), device="cuda:1"
    ),
    "nothing measured": replace(small(), measured=False, tree="sequoia", draft_mode="expanded", draft_bits=2),
    "bare": replace(small(), target="\u2028é\\", parts=(), sweep=(), what_ifs=(), notes=()),
}


@pytest.mark.parametrize("name", MADE)
def test_round_trip(name: str) -> None:
    plan = MADE[name]
    assert Plan.from_text(plan.to_text()) == plan
    assert Plan.from_json(json.loads(json.dumps(plan.to_json(), allow_nan=False))) == plan


def test_the_former_name_of_the_self_draft() -> None:
    plan = replace(small(), draft="self")
    assert Plan.from_json(plan.to_json() | {"draft": "substitute"}) == plan


def test_file_is_readable() -> None:
    text = small().to_text()
    assert text.startswith('{\n "offspec_plan": 2,\n "target": ')
    assert '"tiers": "2 disk, 1 device, 4 disk, 1 device' in text
    assert len(text.splitlines()) <= 102
    value = small().to_json()
    value["placement"]["tiers"] = "1 disk,1 disk ,  28 device"
    tiers = Plan.from_json(value).placement.tiers
    assert tiers == (Tier.DISK,) * 2 + (Tier.DEVICE,) * 28, "they may be written more loosely"


def test_optional_fields() -> None:
    value = small().to_json()
    assert not {"sequences", "shared"} & value.keys()
    assert value["costs"].keys() == {field.name for field in fields(PassCosts)} - {"experts", "caches"}
    assert Plan.from_json(small().to_json()).costs == PassCosts(**asdict(small().costs))
    del value["measured"]
    assert Plan.from_json(value) == replace(small(), measured=False), "as earlier plans were"


def places(value: Any, path: Path = ()) -> Iterator[Path]:
    """Paths of all values in a JSON value, except the inside of the hardware, which is tested separately."""
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


def wrong_for(value: Any) -> tuple[object, ...]:
    """Values that are invalid in place of a value of this type."""
    if isinstance(value, str):
        return 5, None
    if isinstance(value, list):
        return None, "?", [5]
    if isinstance(value, dict):
        return None, [], {}, {"a": 1}
    if isinstance(value, bool):
        return 5, None
    return "?", True, -0.5, float("nan"), 10**400, []


@pytest.mark.parametrize("name", ["small", "large"])
def test_every_damaged_or_missing_value_is_named(name: str) -> None:
    text = json.dumps(MADE[name].to_json())
    for path in places(json.loads(text)):
        key = next(str(key) for key in reversed(path) if isinstance(key, str))
        for wrong in wrong_for(holder(json.loads(text), path)[path[-1]]):
            damaged = json.loads(text)
            holder(damaged, path)[path[-1]] = wrong
            with pytest.raises(ValueError) as caught:
                Plan.from_json(damaged)
            said = str(caught.value)
            assert key in said and "\n" not in said and len(said) < 300, (path, wrong)
        if isinstance(path[-1], str) and path != ("measured",):
            damaged = json.loads(text)
            del holder(damaged, path)[path[-1]]
            with pytest.raises(ValueError, match=path[-1]):
                Plan.from_json(damaged)


@pytest.mark.parametrize("path", [(), ("placement",), ("costs",), ("forecast",), ("sweep", 0), ("parts", 0)])
def test_unknown_key_is_named(path: Path) -> None:
    damaged = small().to_json()
    holder(damaged, (*path, "colour"))["colour"] = "red"
    with pytest.raises(ValueError, match="colour is not known here"):
        Plan.from_json(damaged)


TIERS, HEAD, STAGING = ("placement", "tiers"), ("placement", "head"), ("placement", "staging")


@pytest.mark.parametrize(
    ("name", "path", "wrong", "said"),
    [
        ("small", TIERS, "5 disk, 1 tape", "placement.tiers"),
        ("small", TIERS, "0 disk", "placement.tiers"),
        ("small", TIERS, "99999 disk", "placement.tiers"),
        ("small", TIERS, "٣ disk", "placement.tiers"),
        ("small", TIERS, "", "placement.tiers"),
        ("small", TIERS, "15 disk, 15 host", "a CPU computes in RAM"),
        ("small", TIERS, "30 device", "0 where all is on the device"),
        ("small", HEAD, "host", "a CPU computes in RAM"),
        ("small", ("placement", "slots"), 0, "above 0 where anything streams"),
        ("small", STAGING, 3, "placement.staging is 3"),
        ("large", STAGING, 0, "staging is 0"),
        ("small", ("device",), "tpu", '"cpu" or "cuda"'),
        ("small", ("device",), "cpu\n", "^device is .*; it should be"),
        ("small", ("device",), "cuda", "vram is null"),
        ("small", ("vram",), 10**9, "the device is a CPU"),
        ("small", ("costs", "compute"), [[4, 1.0], [2, 2.0]], "ascending"),
        ("small", ("costs", "compute"), [[0, 1.0]], "costs.compute"),
        ("small", ("costs", "step"), [], "costs.step"),
        ("small", ("forecast", "bound"), "weather", '"link", "compute", "draft"'),
        ("small", ("forecast", "tok_per_s"), "\ud800", r"^forecast.tok_per_s is .*ud800.*; it should be"),
        (
            "small",
            ("sweep", 0, "tok_per_s"),
            "fast",
            r'sweep\[0\].tok_per_s is "fast"; it should be a number above 0',
        ),
        ("small", ("budget",), 0, "budget is 0; it should be a whole number of 1 or more"),
        ("small", ("context",), 1, "context is 1"),
        ("small", ("hardware", "disk"), -1, "hardware: disk"),
        ("several", ("sequences",), 0, "sequences is 0; it should be a whole number of 1 or more"),
        ("several", ("budget",), 7, "budget is 7; it should be at least 8, a node of each sequence"),
        ("experts by need", ("placement", "expert_slots"), 0, "placement.expert_slots is 0"),
        ("experts by need", ("placement", "host_expert_slots"), 5, "placement.host_expert_slots is 5"),
        ("experts by need", ("costs", "experts", "sources"), [[1.5, 0.01]], "costs.experts.sources"),
        ("experts by need", ("costs", "experts", "spread"), [[16, 0.8], [1, 0.9]], "costs.experts.spread"),
        ("experts by need", ("costs", "experts", "count"), 0, "costs.experts.count is 0"),
    ],
)
def test_inconsistent_values(name: str, path: Path, wrong: object, said: str) -> None:
    damaged = MADE[name].to_json()
    holder(damaged, path)[path[-1]] = wrong
    with pytest.raises(ValueError, match=said):
        Plan.from_json(damaged)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "nested"),
        ("[]", "not a plan"),
        ('{"architectures": ["LlamaForCausalLM"]}', "not a plan"),
        ('{"offspec_plan": 3}', "offspec_plan is 3; this version of offspec reads up to 2"),
        ('{"offspec_plan": 1}', "offspec_plan is 1, of an earlier offspec; make one by `offspec plan`"),
        ('{"offspec_plan": "1"}', "offspec_plan is"),
        ('{"offspec_plan": 2}', "is missing"),
    ],
)
def test_files_that_are_not_plans(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Plan.from_text(text)


def test_bytes_that_stream() -> None:
    assert small().streamed(Tier.DISK) == 2_712_000_000
    assert large().streamed(Tier.DISK, Tier.HOST) == 85_600_000_000 + 42_800_000_000 + 2_100_000_000


def test_best_width_of_each_tree_size() -> None:
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
    found = Validation(validation().rows[:2])  # an even number
    assert found.seconds_per_pass == Comparison(1.35, pytest.approx(1.345))
