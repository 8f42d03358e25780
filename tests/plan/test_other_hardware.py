"""Plans for machines that are elsewhere: from a configuration alone, and such as the field would expect."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from offspec.checkpoint.shapes import known_config
from offspec.core.config import EngineConfig
from offspec.core.errors import CapacityError, CheckpointError, RequestError
from offspec.plan.hardware_profile import known_machine
from offspec.plan.other_hardware import plan_for_hardware
from offspec_planners.acceptance import typical
from offspec_planners.hardware import preset
from offspec_planners.placement import Tier, cpu_layers
from offspec_planners.plan import Plan
from offspec_planners.typical_acceptance import expected_tokens
from tests.support.products import some
from tests.support.sample_plans import LAPTOP

SMALL = "meta-llama/Llama-3.2-1B-Instruct"
MIDDLE = "meta-llama/Llama-3.1-8B-Instruct"
LARGE = "meta-llama/Llama-3.1-70B-Instruct"
GB = 10**9


def _plan(model: str, machine: str, **settings: object) -> Plan:
    """With budget and width given, which leaves only the draft and the placement to choose."""
    config = EngineConfig(model, **{"budget": 768, "width": 32, **settings})
    return plan_for_hardware(config, known_machine(machine))


def test_a_configuration_is_enough(tmp_path: Path) -> None:
    """A file, a folder with nothing else in it, and the hub id of a well-known model give the same plan."""
    config = known_config(SMALL)
    assert config is not None
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    found = [_plan(name, "laptop-8gb", draft="none") for name in (SMALL, str(file), str(tmp_path))]
    assert len({plan.target_print for plan in found}) == 1
    assert len({(plan.placement, plan.forecast, plan.costs) for plan in found}) == 1
    assert Plan.from_text(found[1].to_text()) == found[1]


def test_nothing_to_plan_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        _plan(str(tmp_path), "rtx-4090")


def test_without_a_draft_a_pass_is_a_token() -> None:
    plan = _plan(LARGE, "rtx-4090-256gb", draft="none")
    assert (plan.draft, plan.budget, plan.forecast.tokens_per_pass) == ("none", 1, 1.0)
    # All of it crosses PCIe, but for what VRAM keeps.
    moved = plan.streamed(Tier.HOST, Tier.DISK)
    assert 110 * GB < moved < 141 * GB
    assert plan.forecast.seconds_per_pass == pytest.approx(moved / 25e9, rel=0.01)


@pytest.mark.parametrize(
    ("machine", "draft", "mode", "slow", "fast"),
    some(
        [
            ("rtx-4090", MIDDLE, "full", 0.5, 1.3),  # half of it comes from disk
            ("rtx-4090-256gb", MIDDLE, "full", 1.4, 3.0),  # SpecExec: 2 to 3 tok/s in 16 bits; Sequoia: 1.75
            ("rtx-4070-ti", MIDDLE, "packed", 0.4, 1.0),  # UMbreLLa's users take the 1B, in 16 bits
            ("rtx-3060-12gb", MIDDLE, "packed", 0.15, 0.4),
            ("laptop-8gb", SMALL, "full", 0.3, 0.8),
        ],
        ("rtx-4090-256gb", MIDDLE, "full", 1.4, 3.0),
        ("rtx-3060-12gb", MIDDLE, "packed", 0.15, 0.4),
    ),
)
def test_a_70b_as_the_field_knows_it(machine: str, draft: str, mode: str, slow: float, fast: float) -> None:
    plan = _plan(LARGE, machine)
    assert (plan.draft, plan.draft_mode, plan.forecast.bound) == (draft, mode, "link")
    assert slow < plan.forecast.tok_per_s < fast
    assert "of the target's weights, not measured" in plan.acceptance
    assert plan.forecast.tok_per_s > 5 * plan.tok_per_s_alone


def test_nobody_drafts_where_that_is_no_slower() -> None:
    plan = plan_for_hardware(EngineConfig(SMALL), known_machine("rtx-4090"))
    assert plan.draft == "none" and plan.placement.slots == 0
    assert plan.forecast.tok_per_s > 100


def test_a_machine_that_is_too_small() -> None:
    with pytest.raises(CapacityError, match="--vram"):
        _plan(LARGE, "laptop-8gb", vram=3 * GB)
    with pytest.raises(CapacityError, match="--memory"):
        _plan(LARGE, "laptop-8gb", memory=2 * GB)


def test_the_cpu_computes_layers_where_that_is_faster() -> None:
    """With few nodes and much RAM; in bfloat16 as many as are asked for, and a row says how many would do."""
    small = _plan(LARGE, "rtx-4090-256gb", draft="none", budget=1)
    assert not small.placement.layers(Tier.CPU), "answers would depend on what the plan was made for"
    row = next(row for row in small.what_ifs if "computed by the CPU" in row.change)
    layers = int(row.change.split()[0])
    assert f"--cpu-layers {layers}`" in row.note and "bfloat16" in row.note
    asked = _plan(LARGE, "rtx-4090-256gb", draft="none", budget=1, cpu_layers=layers)
    assert len(asked.placement.layers(Tier.CPU)) == layers
    assert asked.placement.layers(Tier.CPU) == cpu_layers(80, layers)
    assert asked.forecast.tok_per_s == pytest.approx(row.tok_per_s) and row.tok_per_s is not None
    assert asked.forecast.tok_per_s > 2 * small.forecast.tok_per_s
    assert asked.streamed(Tier.HOST, Tier.DISK) < small.streamed(Tier.HOST, Tier.DISK)
    assert any(part.tier == Tier.CPU and "caches" in part.what for part in asked.parts)
    assert Plan.from_text(asked.to_text()) == asked
    for fewer, more in ((layers - 1, layers), (layers + 1, layers)):
        near = [_plan(LARGE, "rtx-4090-256gb", draft="none", budget=1, cpu_layers=n) for n in (fewer, more)]
        assert near[0].forecast.tok_per_s < near[1].forecast.tok_per_s


def test_large_trees_leave_the_cpu_little_to_gain() -> None:
    plan = _plan(LARGE, "rtx-4090-256gb", draft=MIDDLE)
    rows = [row for row in plan.what_ifs if "computed by the CPU" in row.change]
    assert all((row.tok_per_s or 0) < 1.15 * plan.forecast.tok_per_s for row in rows)


def test_two_gpus() -> None:
    """Twice the memory and two links; the draft and the head are the first one's."""
    one, two = (
        _plan(LARGE, "rtx-4090-256gb", draft=MIDDLE, device=device) for device in ("cuda", "cuda:0,cuda:1")
    )
    assert (two.device, two.more_vram) == ("cuda:0,cuda:1", (two.vram,)) and one.more_vram == ()
    assert len(two.placement.resident) > len(one.placement.resident) + 8
    assert two.placement.gpu_count == 2 and two.forecast.tok_per_s > 1.5 * one.forecast.tok_per_s
    for gpu, limit in enumerate((two.vram, *two.more_vram)):
        parts = [part for part in two.parts if part.tier == Tier.DEVICE and part.gpu == gpu]
        assert limit is not None and 0.85 * limit < sum(part.bytes for part in parts) <= limit
        assert ("draft" in {part.what for part in parts}) == (gpu == 0)
    assert Plan.from_text(two.to_text()) == two
    with pytest.raises(RequestError, match="name them"):
        _plan(LARGE, "rtx-4090", device="all")


def test_in_float32_a_plan_chooses_how_many_layers_the_cpu_computes() -> None:
    plan = _plan(MIDDLE, "laptop-8gb", draft="none", budget=1, dtype="float32", memory=60 * GB)
    chosen = len(plan.placement.layers(Tier.CPU))
    assert chosen > 0
    none = _plan(MIDDLE, "laptop-8gb", draft="none", budget=1, dtype="float32", memory=60 * GB, cpu_layers=0)
    assert not none.placement.layers(Tier.CPU)
    assert plan.forecast.tok_per_s > 1.2 * none.forecast.tok_per_s


def test_layers_of_the_cpu_that_ram_does_not_hold() -> None:
    with pytest.raises(CapacityError, match=r"layers of the CPU .* GB.*--memory.*or --cpu-layers"):
        _plan(LARGE, "rtx-4090", draft="none", budget=1, cpu_layers=60)


def test_a_machine_without_a_gpu(tmp_path: Path) -> None:
    file = tmp_path / "laptop.json"
    LAPTOP.save(file)
    plan = _plan(MIDDLE, str(file))
    assert (plan.device, plan.vram, plan.hardware) == ("cpu", None, LAPTOP)
    assert set(plan.placement.tiers) == {Tier.DEVICE, Tier.DISK} and plan.placement.staging == 0
    assert plan.draft == SMALL and plan.forecast.link_seconds > 1
    for wanted in ({"device": "cuda"}, {"cpu_layers": 3}):
        with pytest.raises(RequestError, match="no GPU"):
            _plan(MIDDLE, str(file), **wanted)
    replace(preset("laptop-8gb"), host=None).save(file)
    with pytest.raises(RequestError, match="says nothing of its CPU"):
        _plan(MIDDLE, str(file), cpu_layers=3)


@pytest.mark.parametrize(
    ("quantised", "bits"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        ({"quant_method": "gptq", "bits": 8}, 8.5),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4}}}}, 4.5),
        ({"quant_method": "fp8"}, 8.5),
    ],
)
def test_a_quantised_configuration(tmp_path: Path, quantised: dict[str, object], bits: float) -> None:
    """Is planned for at its own size, with what unpacking takes; and no smaller format is offered."""
    config = known_config(MIDDLE)
    assert config is not None
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantised}))
    whole = _plan(MIDDLE, "laptop-8gb", draft="none", vram=6 * GB)
    packed = _plan(str(tmp_path), "laptop-8gb", draft="none", vram=6 * GB)
    assert packed.streamed(Tier.HOST, Tier.DISK) < whole.streamed(Tier.HOST, Tier.DISK)
    assert packed.forecast.compute_seconds > whole.forecast.compute_seconds
    sizes = {part.what: part.bytes for part in packed.parts if part.what == "layers"}
    assert sizes
    assert packed.target_print != whole.target_print
    rows = {row.change for plan in (whole, packed) for row in plan.what_ifs if "packed" in row.change}
    assert rows == {"the target packed to nf4", "the target packed to int8"}
    assert not any("packed" in row.change for row in packed.what_ifs)
    total = sum(part.bytes for part in packed.parts if part.what == "layers")
    assert total == pytest.approx(
        sum(part.bytes for part in whole.parts if part.what == "layers") * bits / 16, rel=0.02
    )


def test_a_folder_gets_the_drafts_of_its_shape(tmp_path: Path) -> None:
    """And every row of what would help does: none of RAM where nothing comes from disk."""
    config = known_config(LARGE)
    assert config is not None
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = _plan(str(tmp_path), "rtx-4090")
    alone = _plan(str(tmp_path), "rtx-4090", draft="none")
    assert plan.draft_mode == "full" and plan.forecast.tok_per_s > 3 * alone.forecast.tok_per_s
    assert alone.acceptance == "there is no draft"
    for made in (plan, alone):
        assert Tier.DISK not in made.placement.tiers
        helping = [row for row in made.what_ifs if row.change != "no draft"]
        assert all((row.tok_per_s or 0) >= 1.05 * made.forecast.tok_per_s for row in helping)
        assert not any(row.change.endswith("of RAM") for row in helping)
        places = [row.note for row in helping if row.change.endswith("of VRAM")]
        assert places and len(set(places)) == len(places)
        assert next(row.note for row in helping if "link" in row.change) == "RAM to VRAM"
    assert [row.change for row in plan.what_ifs].count("no draft") == 1
    assert not any(row.change == "no draft" for row in alone.what_ifs)


def test_more_of_a_memory_is_told_as_long_as_it_brings_more() -> None:
    plan = _plan(LARGE, "rtx-4090", draft=MIDDLE)
    speeds = [row.tok_per_s or 0.0 for row in plan.what_ifs if row.change.endswith(" of RAM")]
    first, second = speeds  # of three: twice the RAM holds all layers
    assert second >= 1.05 * first
    assert next(row.note for row in plan.what_ifs if "link" in row.change) == "the disk and RAM to VRAM"


def test_a_large_draft_in_few_bits_makes_room_for_layers() -> None:
    plan = _plan(LARGE, "rtx-4090", draft=MIDDLE)
    [row] = [row for row in plan.what_ifs if "draft kept in 4 bits" in row.change]
    assert (row.tok_per_s or 0) > 1.05 * plan.forecast.tok_per_s
    small = _plan(LARGE, "rtx-4090", draft=MIDDLE, draft_bits=4, vram=20 * GB)
    assert small.draft_mode == "packed" and not any("in 4 bits" in row.change for row in small.what_ifs)


def test_this_process_has_no_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process happens to hold is nothing to a machine elsewhere."""
    plan = _plan(SMALL, "laptop-8gb", memory=2 * GB)
    monkeypatch.setattr("offspec.core.memory.resident_bytes", lambda: 3 * GB)
    monkeypatch.setattr("offspec.core.memory._first_runtime", 0)
    assert _plan(SMALL, "laptop-8gb", memory=2 * GB).placement == plan.placement


def test_a_larger_draft_is_expected_to_guess_better() -> None:
    shares = [0.001, 0.007, 1.24 / 69.5, 0.05, 7.5 / 69.5]
    calibrations = [typical("model", share) for share in shares]
    expected = [expected_tokens(calibration.forest, 256) for calibration in calibrations]
    assert expected == sorted(set(expected)) and expected[0] > 3
    assert expected[2] / expected[-1] == pytest.approx(0.75, abs=0.03)
    accepted = [calibration.acceptance()[:, 0].mean() for calibration in calibrations]
    assert accepted == sorted(set(accepted))
    assert expected_tokens(typical("model", 0.9).forest, 256) == expected[-1]


def test_a_substitute_in_fewer_bits_is_expected_to_guess_worse() -> None:
    expected = [expected_tokens(typical("substitute", bits=bits).forest, 128) for bits in (4, 3, 2)]
    assert expected[0] > 1.5 * expected[1] > 2 * expected[2] > 4
    accepted = [typical("substitute", bits=bits).acceptance()[:, 0].mean() for bits in (2, 3, 4)]
    assert accepted == sorted(set(accepted))


def test_a_plan_names_the_bits_of_its_draft() -> None:
    plan = _plan(LARGE, "laptop-8gb", draft=SMALL, draft_bits=3)
    assert (plan.draft, plan.draft_bits) == (SMALL, 3) and plan.draft_mode in ("packed", "expanded")
    assert Plan.from_text(plan.to_text()) == plan


def test_a_preset_by_the_name_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert known_machine("rtx-4090.json") == known_machine("rtx-4090") == preset("rtx-4090")
    LAPTOP.save(tmp_path / "rtx-4090.json")
    assert known_machine("rtx-4090.json") == LAPTOP
    with pytest.raises(RequestError, match="presets are"):
        known_machine("rtx-9999.json")
