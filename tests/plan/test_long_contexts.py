"""Contexts that do not fit on a device: the KV cache is in RAM, or in fewer bits, and plans show it."""

from dataclasses import replace

import pytest

from offspec.core.config import EngineConfig
from offspec.core.errors import CapacityError
from offspec.plan.hardware_profile import load_hardware
from offspec.plan.other_hardware import plan_for_hardware
from offspec_planners.placement import Tier
from offspec_planners.plan import Plan
from offspec_planners.plan.explain import explain_placement

GB = 10**9
LARGE = "meta-llama/Llama-3.1-70B-Instruct"
MIDDLE = "meta-llama/Llama-3.1-8B-Instruct"
LONG = 131_072


def planned(model: str, vram: float, ram: float, **settings: object) -> Plan:
    config = EngineConfig(
        model,
        **{"device": "cuda", "draft": "none", "vram": int(vram * GB), "memory": int(ram * GB), **settings},
    )
    return plan_for_hardware(config, load_hardware("rtx-4090"))


def parts(plan: Plan, what: str) -> dict[str, int]:
    return {part.tier: part.bytes for part in plan.parts if part.what == what}


def test_long_context_on_a_small_gpu() -> None:
    """128k tokens of a 70B model on 12 GB: two layers' rows on the card, all of them in RAM."""
    plan = planned(LARGE, 12, 64, context=LONG)
    assert (plan.placement.caches, plan.context) == (Tier.HOST, LONG)
    rows = LONG + plan.budget
    each = 2 * 8 * 128 * 2  # bytes of a layer's keys and values at a position
    assert parts(plan, "caches") == {
        "host": 80 * each * rows,
        "device": pytest.approx(2 * each * rows, abs=1000),
    }
    device = sum(part.bytes for part in plan.parts if part.tier == Tier.DEVICE)
    host = sum(part.bytes for part in plan.parts if part.tier == Tier.HOST)
    assert device <= 12 * GB and host <= 64 * GB
    assert Plan.from_text(plan.to_text()) == plan
    assert any("KV cache is in RAM" in sentence for sentence in explain_placement(plan))
    # Bytes that cross the link in addition to weights.
    assert plan.hardware.link is not None
    moved = plan.costs.link - plan.streamed(Tier.DISK) / plan.hardware.disk.value
    assert moved == pytest.approx(80 * each * LONG / plan.hardware.link.value, rel=0.01)
    with pytest.raises(CapacityError, match="KV cache in RAM"):
        planned(LARGE, 12, 32, context=LONG)


def test_kv_cache_stays_on_the_device_if_it_fits() -> None:
    plan = planned(MIDDLE, 24, 64, context=8192)
    assert plan.placement.caches is Tier.DEVICE
    wrong = replace(plan, placement=replace(plan.placement, caches=Tier.DISK))
    with pytest.raises(ValueError, match=r"placement\.caches"):
        Plan.from_text(wrong.to_text())
    short = planned(MIDDLE, 5.5, 64)
    assert short.placement.caches is Tier.DEVICE
    text = short.to_text()
    assert "caches" not in text.split('"parts"')[0] and Plan.from_text(text) == short


def test_int8_kv_cache_nearly_doubles_the_context() -> None:
    model, narrow = (planned(MIDDLE, 24, 64, context=16_384, kv_cache=kind) for kind in ("model", "int8"))
    before, after = (
        parts(plan, "caches")["device"] / (plan.context + plan.budget) for plan in (model, narrow)
    )
    assert before / after == pytest.approx(2 / (1 + 4 / 128), rel=1e-3)
    assert narrow.kv_cache == "int8" and Plan.from_text(narrow.to_text()) == narrow


def test_caches_of_cpu_layers_stay_in_ram() -> None:
    """The windows are those of one device, which computes all layers."""
    plan = planned(MIDDLE, 24, 64, context=8192, cpu_layers=2)
    assert plan.placement.caches is Tier.DEVICE and len(plan.placement.layers(Tier.CPU)) == 2
    wrong = replace(plan, placement=replace(plan.placement, caches=Tier.HOST))
    with pytest.raises(ValueError, match=r"placement\.caches.*computes all layers"):
        Plan.from_text(wrong.to_text())
