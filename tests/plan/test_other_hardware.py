"""Plans for other hardware: from a configuration alone, and consistent with published results."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from offspec.checkpoint.known_models import known_config
from offspec.core import memory
from offspec.core.config import EngineConfig
from offspec.core.errors import CapacityError, CheckpointError, ModelNotFoundError, RequestError
from offspec.core.events import Event, Notice
from offspec.engine import calibration_run
from offspec.engine.calibration_run import make_plan
from offspec.plan.hardware_profile import Profile, load_hardware
from offspec.plan.other_hardware import plan_for_hardware
from offspec_planners.acceptance import typical
from offspec_planners.hardware_rates import Hardware, preset
from offspec_planners.placement import Tier, cpu_layers
from offspec_planners.plan import Plan
from offspec_planners.plan.explain import explain, explain_placement
from offspec_planners.plan.forecast import WhatIf
from offspec_planners.typical_acceptance import MODEL, SELF_DRAFT, TypicalDraft, expected_tokens
from tests.support.exhaustive import sampled_params
from tests.support.sample_plans import LAPTOP

SMALL = "meta-llama/Llama-3.2-1B-Instruct"
MIDDLE = "meta-llama/Llama-3.1-8B-Instruct"
LARGE = "meta-llama/Llama-3.1-70B-Instruct"
MIXTURE = "Qwen/Qwen3-30B-A3B"
GB = 10**9


@cache
def _plan(model: str, machine: str | Hardware, **settings: object) -> Plan:
    """Plan with a fixed budget and width, which leaves only the draft and the placement to choose."""
    config = EngineConfig(model, **{"budget": 768, "width": 32, **settings})
    return plan_for_hardware(config, load_hardware(machine) if isinstance(machine, str) else machine)


def _layers(plan: Plan) -> int:
    """Return the bytes of all layers."""
    return sum(part.bytes for part in plan.parts if part.what == "layers")


def _config_file(folder: Path, model: str, **changes: object) -> str:
    """Return a folder with only the configuration of a well-known model."""
    config = known_config(model)
    assert config is not None
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return str(folder)


def _kept(plan: Plan) -> bool:
    """Return whether the plan survives being written and read."""
    return Plan.from_text(plan.to_text()) == plan


def test_configuration_is_enough_for_a_plan(tmp_path: Path) -> None:
    """A file, a folder with nothing else in it, and the hub id of a well-known model give the same plan."""
    folder = _config_file(tmp_path, SMALL)
    found = [_plan(name, "laptop-8gb", draft="none") for name in (SMALL, f"{folder}/config.json", folder)]
    assert len({plan.target_print for plan in found}) == 1
    assert len({(plan.placement, plan.forecast, plan.costs) for plan in found}) == 1
    assert _kept(found[1])
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError):
        _plan.__wrapped__(folder, "rtx-4090")


def test_configuration_is_planned_for_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its profile, with the free memory; an invalid configuration is an error of one line."""
    asked, told = list[str](), list[Event]()

    def profile(device: str, notify: object) -> Profile:
        asked.append(device)
        return Profile(LAPTOP, "2026-01-01T00:00:00+00:00")

    monkeypatch.setattr(calibration_run, "profile", profile)
    folder = _config_file(tmp_path, SMALL)
    plan = make_plan(EngineConfig(folder, draft="none"), notify=told.append)
    assert plan.hardware == LAPTOP and plan.forecast.tok_per_s > 0
    assert plan.memory <= memory.usable_bytes() * 1.2
    assert any("no weights to measure" in event.text for event in told if isinstance(event, Notice))
    limited = make_plan(EngineConfig(f"{folder}/config.json", draft="none", memory=2 * GB))
    assert limited.memory == 2 * GB and asked == ["cpu"] * 2
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        make_plan(EngineConfig(f"{folder}/config.json"))


@pytest.mark.exhaustive
def test_several_sequences() -> None:
    machine = preset("rtx-4090")
    machine = replace(machine, processor=replace(machine.processor, memory=12 * GB))
    settings = {"draft": SMALL, "context": 2048, "draft_bits": 4, "budget": 256, "width": 16}
    one, eight = (_plan(MIDDLE, machine, sequences=count, **settings) for count in (1, 8))
    assert "sequences" not in one.to_json() and not one.shared and eight.sequences == 8
    assert 3 * one.forecast.tok_per_s < eight.forecast.tok_per_s < 8 * one.forecast.tok_per_s
    rows = {row.sequences: row for row in eight.shared}
    assert {1, 2, 4, 8} <= rows.keys() and rows[8].tok_per_s == eight.forecast.tok_per_s
    assert rows[1].tok_per_s == pytest.approx(one.forecast.tok_per_s, rel=0.1)
    assert 7 < rows[8].caches / rows[1].caches < 9
    assert {"with 1 sequence"} <= {row.change for row in eight.what_ifs}
    assert not any("sequence" in row.change for row in one.what_ifs)
    assert _kept(eight) and any("sequences" in sentence for sentence in explain(eight))


def test_without_a_draft_a_pass_yields_one_token() -> None:
    plan = _plan(LARGE, "rtx-4090-256gb", draft="none")
    assert (plan.draft, plan.budget, plan.forecast.tokens_per_pass) == ("none", 1, 1.0)
    # All of it crosses PCIe, except the part kept in VRAM.
    moved = plan.streamed(Tier.HOST, Tier.DISK)
    assert 110 * GB < moved < 141 * GB
    assert plan.forecast.seconds_per_pass == pytest.approx(moved / 25e9, rel=0.01)


@pytest.mark.parametrize(
    ("machine", "draft", "slow", "fast"),
    [
        # SpecExec: 2 to 3 tok/s in 16 bits; Sequoia: 1.75.
        pytest.param("rtx-4090-256gb", MIDDLE, 1.4, 3.0, marks=pytest.mark.exhaustive),
        ("rtx-3060-12gb", SMALL, 0.15, 0.4),
    ],
)
def test_70b_model_matches_published_speeds(machine: str, draft: str, slow: float, fast: float) -> None:
    plan = _plan(LARGE, machine)
    assert (plan.draft, plan.draft_mode, plan.forecast.bound) == (draft, "full", "link")
    assert slow < plan.forecast.tok_per_s < fast
    assert plan.notes == (f"Draft: {draft}, a small model with the same vocabulary, with suffix.",)
    assert "of the target's weights" in plan.acceptance and "not measured" in plan.acceptance
    assert plan.forecast.tok_per_s > 5 * plan.tok_per_s_alone


@pytest.mark.parametrize(
    ("model", "machine", "slow", "fast"),
    [
        ("openai/gpt-oss-120b", "rtx-4090", 9.0, 16.0),
        pytest.param("openai/gpt-oss-120b", "desktop-32gb", 1.5, 3.0, marks=pytest.mark.exhaustive),
        pytest.param("zai-org/GLM-4.5", "rtx-4090", 0.15, 0.3, marks=pytest.mark.exhaustive),
    ],
)
def test_moe_model_reads_only_needed_experts(model: str, machine: str, slow: float, fast: float) -> None:
    plan = _plan(model, machine, draft="none")
    experts, placed = plan.costs.experts, plan.placement
    assert experts is not None and 0 < placed.expert_slots < experts.count * experts.layers
    assert plan.forecast.bound == "link" and plan.budget == 1
    assert slow < plan.forecast.tok_per_s < fast
    # Expert misses per token, by hand: its chosen experts except the share in memory.
    share = placed.expert_slots / (experts.count * experts.layers)
    near = next(part.bytes for part in plan.parts if part.what == "experts" and part.tier == Tier.DEVICE)
    missed = experts.layers * experts.chosen * (1 - share) * near / placed.expert_slots
    rate = plan.hardware.link or plan.hardware.disk
    dense = plan.costs.link
    assert plan.forecast.link_seconds >= 0.99 * (dense + missed / rate.value)
    assert _kept(plan)
    assert any("experts" in sentence for sentence in explain(plan))


@pytest.mark.exhaustive
def test_trees_pay_with_few_experts_per_layer_and_not_with_many() -> None:
    """A tree needs all of 8 experts, four times the bytes of a token; with 128 experts, sixteen times."""
    few = _plan("mistralai/Mixtral-8x7B-v0.1", "rtx-4090", draft="mistralai/Mistral-7B-v0.1", draft_bits=4)
    assert few.budget > 16 and few.forecast.tok_per_s > 1.5 * few.tok_per_s_alone
    many = plan_for_hardware(EngineConfig(MIXTURE, draft="Qwen/Qwen3-0.6B", width=8), preset("rtx-4090"))
    assert (many.budget, many.draft_mode) == (1, "none") and "left out" in many.notes[-1]
    alone = _plan(MIXTURE, "rtx-4090", draft="none")
    assert (many.placement, many.forecast) == (alone.placement, alone.forecast)


def test_no_draft_if_it_is_not_faster() -> None:
    plan = plan_for_hardware(EngineConfig(SMALL), load_hardware("rtx-4090"))
    assert plan.draft == "none" and plan.placement.slots == 0
    assert plan.forecast.tok_per_s > 100


@pytest.mark.exhaustive
def test_machine_that_is_too_small() -> None:
    with pytest.raises(CapacityError, match="`vram`"):
        _plan(LARGE, "laptop-8gb", vram=3 * GB)
    with pytest.raises(CapacityError, match="`memory`"):
        _plan(LARGE, "laptop-8gb", memory=2 * GB)


@pytest.mark.exhaustive
def test_cpu_computes_layers_if_that_is_faster() -> None:
    """In bfloat16 only on request, since answers would depend on the plan; a row names the best number."""

    def planned(**layers: int) -> Plan:
        return _plan(LARGE, "rtx-4090-256gb", draft="none", budget=1, **layers)

    small = planned()
    assert not small.placement.layers(Tier.CPU)
    row = next(row for row in small.what_ifs if "computed by the CPU" in row.change)
    layers = int(row.change.split()[0])
    assert f"--cpu-layers {layers}`" in row.note and "bfloat16" in row.note
    asked = planned(cpu_layers=layers)
    assert asked.placement.layers(Tier.CPU) == cpu_layers(80, layers)
    assert asked.forecast.tok_per_s == pytest.approx(row.tok_per_s) and row.tok_per_s is not None
    assert asked.forecast.tok_per_s > 2 * small.forecast.tok_per_s
    assert asked.streamed(Tier.HOST, Tier.DISK) < small.streamed(Tier.HOST, Tier.DISK)
    assert any(part.tier == Tier.CPU and "caches" in part.what for part in asked.parts)
    assert _kept(asked)
    for other in (layers - 1, layers + 1):
        assert planned(cpu_layers=other).forecast.tok_per_s < asked.forecast.tok_per_s


@pytest.mark.exhaustive
def test_cpu_computes_experts_if_that_is_faster() -> None:
    """In bfloat16 only on request, and a row shows the gain; in float32 by the plan."""
    ways: dict[str, Any] = {"draft": "none", "budget": 1, "vram": 12 * GB}
    copied, asked = (_plan(MIXTURE, "rtx-4090-256gb", experts=how, **ways) for how in ("auto", "cpu"))
    assert (
        copied.placement.on_demand_experts
        and not copied.placement.cpu_experts
        and asked.placement.cpu_experts
    )
    row = next(row for row in copied.what_ifs if "`--experts cpu`" in row.note)
    assert asked.forecast.tok_per_s == pytest.approx(row.tok_per_s)
    assert asked.forecast.tok_per_s > 1.05 * copied.forecast.tok_per_s
    assert (asked.least_vram or 0) < (copied.least_vram or 0)
    assert _kept(asked) and "the CPU computes the chosen ones" in " ".join(explain_placement(asked))
    assert _plan(MIXTURE, "rtx-4090-256gb", dtype="float32", **ways).placement.cpu_experts
    with pytest.raises(RequestError, match="no GPU; omit `experts`, which needs a GPU"):
        _plan(MIXTURE, "desktop-32gb", experts="cpu")


@pytest.mark.exhaustive
def test_two_gpus() -> None:
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
    assert _kept(two)
    with pytest.raises(RequestError, match="name them"):
        _plan(LARGE, "rtx-4090", device="all")


def test_float32_plan_chooses_the_number_of_cpu_layers() -> None:
    machine = replace(preset("laptop-8gb"), ram=64 * GB)
    plan = _plan(MIDDLE, machine, draft="none", budget=1, dtype="float32", memory=60 * GB)
    chosen = len(plan.placement.layers(Tier.CPU))
    assert chosen > 0
    none = _plan(MIDDLE, machine, draft="none", budget=1, dtype="float32", memory=60 * GB, cpu_layers=0)
    assert not none.placement.layers(Tier.CPU)
    assert plan.forecast.tok_per_s > 1.2 * none.forecast.tok_per_s


def test_cpu_layers_that_do_not_fit_in_ram() -> None:
    with pytest.raises(CapacityError, match=r"`memory` or use fewer `cpu_layers` .*layers of the CPU .* GB"):
        _plan(LARGE, "rtx-4090", draft="none", budget=1, cpu_layers=60)


def test_gpu_may_be_left_unused() -> None:
    """A plan for it is followed if the model is computed on the CPU."""
    machine = preset("laptop-8gb")
    plan, beside = (_plan(MIDDLE, machine, device=device, draft="none") for device in ("cpu", "auto"))
    assert machine.host is not None and beside.device == "cuda" and plan.forecast != beside.forecast
    alone = replace(machine, link=None, processor=machine.host, host=None)
    assert plan == _plan(MIDDLE, alone, draft="none")
    assert (plan.device, plan.vram, plan.hardware) == ("cpu", None, alone)
    for name, value in (("vram", 6 * GB), ("cpu_layers", 3), ("experts", "gpu")):
        why = f"for the CPU, as set by `device`; omit `{name}`, which needs a GPU"
        with pytest.raises(RequestError, match=why):
            _plan(MIDDLE, machine, device="cpu", **{name: value})
    measured = replace(LAPTOP, name=f"{LAPTOP.processor.name}, 16 GB RAM")
    chip = replace(measured.processor, name="NVIDIA GeForce RTX 4090", memory=24 * GB)
    found = replace(measured, name=f"{chip.name}, 16 GB RAM", link=measured.disk, processor=chip)
    assert replace(found, host=measured.processor).without_gpu() == measured


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        ({"vram": 24 * GB}, r"`vram` is 24.00 GB, and Laptop.* has 8.42 GB of GPU memory: give a smaller"),
        ({"device": "cuda:0,cuda:1", "vram": 24 * GB}, "has 8.42 GB of GPU memory"),
        ({"device": "cpu", "memory": 100 * GB}, "`memory` is .*has 16.84 GB of RAM"),
    ],
)
def test_limit_above_the_memory_of_a_machine(limit: dict[str, object], told: str) -> None:
    with pytest.raises(RequestError, match=told):
        _plan(MIDDLE, "laptop-8gb", draft="none", **limit)


def test_machine_without_a_gpu() -> None:
    plan = _plan(MIDDLE, LAPTOP)
    assert (plan.device, plan.vram, plan.hardware) == ("cpu", None, LAPTOP)
    assert {Tier.DISK} <= set(plan.placement.tiers) <= {Tier.DEVICE, Tier.DISK}
    assert plan.placement.staging == 0
    assert plan.draft == SMALL and plan.forecast.link_seconds > 1
    for wanted in ({"device": "cuda"}, {"cpu_layers": 3}, {"vram": 6 * GB}, {"experts": "gpu"}):
        with pytest.raises(RequestError, match="no GPU"):
            _plan(MIDDLE, LAPTOP, **wanted)
    for wanted in ({"cpu_layers": 3}, {"experts": "cpu"}, {"device": "cpu"}):
        with pytest.raises(RequestError, match="has no figures for its CPU"):
            _plan(MIDDLE, replace(preset("laptop-8gb"), host=None), **wanted)


@pytest.mark.parametrize(
    ("quantized", "bits"),
    [
        ({"quant_method": "gptq", "bits": 8}, 8.5),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4}}}}, 4.5),
    ],
)
def test_quantized_configuration(tmp_path: Path, quantized: dict[str, object], bits: float) -> None:
    folder = _config_file(tmp_path, MIDDLE, quantization_config=quantized)
    whole, packed = (_plan(model, "laptop-8gb", draft="none", vram=6 * GB) for model in (MIDDLE, folder))
    assert packed.streamed(Tier.HOST, Tier.DISK) < whole.streamed(Tier.HOST, Tier.DISK)
    assert packed.forecast.compute_seconds > whole.forecast.compute_seconds
    assert packed.target_print != whole.target_print
    offered = [{row.change for row in plan.what_ifs if "packed" in row.change} for plan in (whole, packed)]
    assert offered == [{"the target packed to nf4", "the target packed to int8"}, set()]
    assert _layers(packed) == pytest.approx(_layers(whole) * bits / 16, rel=0.02)
    with pytest.raises(CheckpointError, match="already quantized"):
        _plan(folder, "laptop-8gb", draft="none", quantize="nf4")


@pytest.mark.exhaustive
def test_folder_gets_the_drafts_of_its_shape(tmp_path: Path) -> None:
    quantized = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    folder = _config_file(tmp_path, LARGE, quantization_config=quantized)
    plan, alone = _plan(folder, "rtx-4090"), _plan(folder, "rtx-4090", draft="none")
    assert plan.draft_mode == "full" and plan.forecast.tok_per_s > 3 * alone.forecast.tok_per_s
    assert plan.notes[-1].endswith(f'A run of a local model downloads it only with `draft="{plan.draft}"`.')
    assert alone.acceptance == "there is no draft"
    for made in (plan, alone):
        assert Tier.DISK not in made.placement.tiers
        helping = [row for row in made.what_ifs if row.change != "no draft"]
        assert all((row.tok_per_s or 0) >= 1.05 * made.forecast.tok_per_s for row in helping)
        assert not any(row.change.endswith("of RAM") for row in helping)
        places = [row.note for row in helping if row.change.endswith("of VRAM")]
        assert places and len(set(places)) == len(places)
        assert next(row.note for row in helping if "link" in row.change) == "RAM to VRAM"
        assert [row.change for row in made.what_ifs].count("no draft") == (made is plan)


def test_larger_memories_are_listed_if_they_help() -> None:
    plan = _plan(LARGE, "rtx-4090", draft=MIDDLE)
    speeds = [row.tok_per_s or 0.0 for row in plan.what_ifs if row.change.endswith(" of RAM")]
    first, second = speeds  # of three: twice the RAM holds all layers
    assert second >= 1.05 * first >= 1.05 * 1.05 * plan.forecast.tok_per_s
    assert next(row.note for row in plan.what_ifs if "link" in row.change) == "the disk and RAM to VRAM"
    short = _plan(MIDDLE, "laptop-8gb", draft=SMALL, context=512)
    assert short.what_ifs and not any("keys" in row.change for row in short.what_ifs), "they are small"


def _row(plan: Plan, change: str) -> WhatIf:
    [row] = [row for row in plan.what_ifs if change in row.change]
    assert row.tok_per_s is not None and row.tok_per_s >= 1.05 * plan.forecast.tok_per_s
    return row


@pytest.mark.parametrize(
    ("change", "setting", "value", "note"),
    sampled_params(
        [
            ("keys and values in int8", "kv_cache", "int8", "`--kv-cache int8`"),
            ("a second GPU like it", "device", "cuda:0,cuda:1", "`--device all`"),
            ("the draft kept in 4 bits", "draft_bits", 4, "`--draft-bits 4`"),
            ("the target packed to nf4", "quantize", "nf4", "`--quantize nf4`"),
        ],
        ("keys and values in int8", "kv_cache", "int8", "`--kv-cache int8`"),
    ),
)
def test_what_ifs_equal_plans_with_those_settings(
    change: str, setting: str, value: object, note: str
) -> None:
    model, machine = MIDDLE, replace(preset("laptop-8gb"), ram=32 * GB)
    around: dict[str, object] = {"draft": SMALL, "context": 2048, "memory": 24 * GB}
    if setting == "kv_cache":
        around["context"] = 24576
    if setting == "draft_bits":  # a large draft, next to a target that is small already
        model, machine, around = LARGE, preset("rtx-4090"), {"draft": MIDDLE, "quantize": "nf4"}
    plan = _plan(model, machine, **around)
    row = _row(plan, change)
    assert note in row.note
    followed = _plan(model, machine, **around, **{setting: value})
    assert row.tok_per_s == pytest.approx(followed.forecast.tok_per_s, rel=0.05)
    assert not any(row.change == change for row in followed.what_ifs)


def test_target_to_be_quantized() -> None:
    whole = _plan(MIDDLE, "laptop-8gb", draft="none", vram=6 * GB)
    for to, bits in (("nf4", 4.25), ("int4-g64", 4.5)):
        plan = _plan(MIDDLE, "laptop-8gb", draft="none", vram=6 * GB, quantize=to)
        assert _layers(plan) == pytest.approx(_layers(whole) * bits / 16, rel=0.01)
        assert plan.quantize == to and plan.target_print != whole.target_print and _kept(plan)
        assert not any("packed" in row.change for row in plan.what_ifs)


@pytest.mark.parametrize(
    ("memory", "said"), [(8, r"nearly fits: \S+ GB of RAM would hold all layers$"), (12, "all layers in RAM")]
)
def test_quantized_target_that_nearly_fits(memory: int, said: str) -> None:
    plan = _plan(MIDDLE, replace(LAPTOP, ram=16 * GB), draft=SMALL, memory=memory * GB, budget=64)
    assert re.search(said, _row(plan, "packed to nf4").note)


def test_omitted_draft_is_reported() -> None:
    plan = _plan(LARGE, LAPTOP, draft="self", memory=8 * GB)
    assert plan.draft_mode == "none"
    [note] = plan.notes
    assert "self is left out" in note and "`draft`" in note
    assert not _plan(LARGE, LAPTOP, draft="none", memory=8 * GB).notes


def test_without_a_network_alternatives_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match=r"config\.json.*`offspec plan list`"):
        _plan("someone/unknown-7B", "rtx-4090")
    with pytest.raises(ModelNotFoundError, match="add `hardware=NAME`"):
        make_plan(EngineConfig("someone/unknown-7B"))


def test_memory_of_this_process_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _plan(SMALL, "laptop-8gb", memory=2 * GB)
    _plan.cache_clear()
    monkeypatch.setattr("offspec.core.memory.resident_bytes", lambda: 3 * GB)
    monkeypatch.setattr("offspec.core.memory._first_runtime", 0)
    assert _plan(SMALL, "laptop-8gb", memory=2 * GB).placement == plan.placement


def test_larger_draft_has_a_higher_predicted_acceptance() -> None:
    shares = [0.001, 0.007, 1.24 / 69.5, 0.05, 7.5 / 69.5]
    calibrations = [typical(MODEL, share) for share in shares]
    expected = [expected_tokens(calibration.forest, 256) for calibration in calibrations]
    assert expected == sorted(set(expected)) and expected[0] > 3
    assert expected[2] / expected[-1] == pytest.approx(0.75, abs=0.03)
    accepted = [calibration.acceptance()[:, 0].mean() for calibration in calibrations]
    assert accepted == sorted(set(accepted))
    assert expected_tokens(typical(MODEL, 0.9).forest, 256) == expected[-1]


@pytest.mark.parametrize("kind", [SELF_DRAFT, MODEL], ids=["self", "model"])
def test_draft_in_fewer_bits_has_a_lower_predicted_acceptance(kind: TypicalDraft) -> None:
    found = [typical(kind, bits=bits) for bits in (4, 3, 2)]
    expected = [expected_tokens(calibration.forest, 128) for calibration in found]
    accepted = [calibration.acceptance()[:, 0].mean() for calibration in found]
    assert expected == sorted(set(expected), reverse=True) and accepted == sorted(set(accepted), reverse=True)
    if kind is SELF_DRAFT:
        assert expected[0] > 1.5 * expected[1] > 2 * expected[2] > 4


@pytest.mark.exhaustive
def test_plan_names_the_bits_of_its_draft() -> None:
    """The draft is quantized, as in a run, on request, or if smaller trees do not make enough room."""
    plan = _plan(LARGE, "laptop-8gb", draft=SMALL, draft_bits=3)
    assert "in 3 bits, not measured" in plan.acceptance
    assert (plan.draft, plan.draft_bits) == (SMALL, 3) and plan.draft_mode in ("packed", "expanded")
    assert _kept(plan)
    plan = plan_for_hardware(EngineConfig(LARGE), load_hardware("laptop-8gb"))
    assert (plan.draft, plan.draft_mode, plan.draft_bits) == (SMALL, "full", 16)
    plan = plan_for_hardware(
        EngineConfig(LARGE, draft=SMALL, vram=68 * GB // 10), load_hardware("laptop-8gb")
    )
    assert (plan.draft, plan.draft_mode, plan.draft_bits) == (SMALL, "packed", 4), "or it has no room at all"
