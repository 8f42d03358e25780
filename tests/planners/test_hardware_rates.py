"""Profiles of machines: JSON round trip, hand-edited files, interpolation, and plausible presets."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offspec_planners.hardware_rates import Hardware, Processor, Rate, find_preset, preset, preset_names

MACHINE = Hardware(
    name="desk, 16 GB RAM",
    ram=16_000_000_000,
    disk=Rate(2e9, 1.5e9, 2.25e9),
    link=Rate.exactly(12e9),
    processor=Processor("chip", 8_000_000_000, Rate.exactly(2e11), ((1, 1e11), (100, 1e13)), 1e-4),
    sources=("a leaflet",),
)
# As published by the makers: bytes per second of memory, FLOP/s of 16-bit products summed in float32.
PEAKS = {
    "NVIDIA GeForce RTX 3060": (360e9, 25.5e12),
    "NVIDIA GeForce RTX 4090": (1008e9, 165.2e12),
    "NVIDIA A100 80GB PCIe": (1935e9, 312e12),
}
MEASURED = ("h100", "h200")  # from bench.gpu_day; the others are estimated from published figures
PUBLISHED = [name for name in preset_names() if name not in MEASURED]
ROOT = Path(__file__).parents[2]


def test_json_round_trip(tmp_path: Path) -> None:
    beside = replace(MACHINE, host=replace(MACHINE.processor, name="a CPU"))
    for machine in (MACHINE, replace(MACHINE, link=None, sources=()), beside):
        assert Hardware.from_json(json.loads(json.dumps(machine.to_json()))) == machine
        (tmp_path / "machine.json").write_text(machine.text())
        assert Hardware.load(tmp_path / "machine.json") == machine
    written = MACHINE.to_json()
    assert written["link"] == 12_000_000_000, "a rate without spread is a number in the file"
    assert written["disk"] == {"value": 2e9, "low": 1.5e9, "high": 2.25e9}
    assert '"disk": 6500000000,' in preset("rtx-4090").text()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda v: v.pop("disk"), "disk"),
        (lambda v: v.update(speed=1), "speed"),
        (lambda v: v.update(version=2), "version"),
        (lambda v: v.update(ram="16GB"), "ram"),
        (lambda v: v.update(disk=0), "disk"),
        (lambda v: v["disk"].update(low=3e9), "disk"),
        (lambda v: v["disk"].pop("high"), r"disk\.high"),
        (lambda v: v.update(processor=None), "processor"),
        (lambda v: v["processor"].update(gemm=[]), r"processor\.gemm"),
        (lambda v: v["processor"].update(gemm=[[1, 0]]), r"processor\.gemm"),
        (lambda v: v["processor"].update(bandwidth=True), r"processor\.bandwidth"),
        (lambda v: v["processor"].update(layer_overhead=-1), r"processor\.layer_overhead"),
        (lambda v: v.update(sources="a leaflet"), "sources"),
        (lambda v: v.update(host={**v["processor"], "gemm": [[4, 1e9], [2, 1e9]]}), r"host\.gemm"),
    ],
)
def test_invalid_value_is_named_in_one_line(change: Callable[[dict[str, Any]], object], named: str) -> None:
    values = MACHINE.to_json()
    change(values)
    with pytest.raises(ValueError, match=named) as caught:
        Hardware.from_json(values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1}', "{" * 10_000])
def test_file_that_is_not_a_profile(text: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(ValueError):
        Hardware.load(file)


def test_power_law_between_points_and_constant_outside() -> None:
    chip = MACHINE.processor
    assert chip.flops(1) == pytest.approx(1e11)
    assert chip.flops(100) == pytest.approx(1e13)
    assert chip.flops(10) == pytest.approx(1e12)
    assert chip.flops(7) == pytest.approx(7e11)  # operations grow with the rows: the weights are read once
    assert chip.flops(0.5) == pytest.approx(1e11)
    assert replace(chip, gemm=((1, 1e11), (100, 1e12))).flops(10) == pytest.approx(10**11.5)
    assert chip.flops(5000) == pytest.approx(1e13)


@given(st.lists(st.floats(1.0, 1e12), min_size=1, max_size=9))
def test_rate_from_readings(readings: list[float]) -> None:
    rate = Rate.of(readings)
    assert (rate.low, rate.high) == (min(readings), max(readings))
    assert rate.low <= rate.value <= rate.high
    assert rate.spread >= 0


def test_fingerprint_depends_on_the_machine_not_its_rates() -> None:
    kept = MACHINE.fingerprint()
    assert len(kept) == 12 and int(kept, 16) >= 0
    chip = MACHINE.processor
    assert replace(MACHINE, disk=Rate.exactly(1.0), sources=()).fingerprint() == kept
    assert (
        replace(MACHINE, ram=16_100_000_000).fingerprint() == kept
    )  # the memory reserved by the kernel varies
    assert replace(MACHINE, ram=32_000_000_000).fingerprint() != kept
    assert replace(MACHINE, link=None).fingerprint() != kept
    assert replace(MACHINE, name="other").fingerprint() != kept
    assert replace(MACHINE, processor=replace(chip, name="other")).fingerprint() != kept


def test_presets_have_distinct_fingerprints() -> None:
    assert len({preset(name).fingerprint() for name in preset_names()}) == len(preset_names())
    with pytest.raises(ValueError, match="rtx-4090"):
        preset("rtx-9090")


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_stay_below_published_figures(name: str) -> None:
    machine = preset(name)
    for chip in filter(None, (machine.processor, machine.host)):
        for rows, rate in chip.gemm:
            assert (
                rate <= rows * chip.bandwidth.value * 1.01
            )  # two bytes and two operations per weight and row
        assert chip.flops(1) == pytest.approx(chip.bandwidth.value), "few rows are bound by memory"
        assert [rate for _, rate in chip.gemm] == sorted(rate for _, rate in chip.gemm)
    parts = ["Disk", "RAM", "CPU", "layer_overhead"]
    if machine.link is not None:
        chip, host = machine.processor, machine.host
        if chip.name in PEAKS:
            bandwidth, flops = PEAKS[chip.name]
            assert 0.85 <= chip.bandwidth.value / bandwidth <= 0.95 and 0.6 <= chip.flops(4096) / flops <= 0.9
        assert host is not None and chip.memory < machine.ram and host.flops(256) < chip.flops(256)
        assert machine.disk.value < machine.link.value < host.bandwidth.value < chip.bandwidth.value
        parts += ["GPU", "Link", "Bandwidth", "gemm"]
    for part in parts:
        assert any(source.startswith(part) for source in machine.sources), part


def test_preset_without_a_gpu_equals_the_cpu_of_one_with() -> None:
    """Two presets with the same CPU and disk differ only in the GPU."""
    alone, beside = preset("desktop-32gb"), preset("rtx-4090")
    assert alone.link is None and alone.host is None and beside.host is not None
    assert alone.disk == beside.disk
    assert alone.processor == replace(beside.host, memory=alone.ram)


@pytest.mark.parametrize("name", MEASURED)
def test_measured_preset_equals_its_record(name: str) -> None:
    """`row_linear`, copies and memory as measured on an H200; an H100 has slower memory."""
    steps = json.loads((ROOT / "bench/results/gpu/h200-a.json").read_text("utf-8"))["steps"]
    machine = preset(name)
    weights = 2 * 8192 * (8192 + 1024 + 28672) + 28672 * 8192
    for rows, rate in machine.processor.gemm:
        assert rate == pytest.approx(
            2 * weights * rows / steps["products"]["layer"][str(rows)]["row_linear"], rel=5e-3
        )
    assert machine.link is not None
    assert machine.link.value == pytest.approx(steps["link"]["copies"]["16 MiB"]["bytes_per_s"], rel=2e-3)
    published = {"h200": 4.8e12, "h100": 3.35e12}[name]
    assert 0.85 <= machine.processor.bandwidth.value / published <= 0.95
    if name == "h200":
        measured = steps["products"]["ceiling"]["bytes_per_s"]
        assert machine.processor.bandwidth.value == pytest.approx(measured, rel=1e-2)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("4090", "rtx-4090"),
        ("RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("rtx_4090_sata", "rtx-4090-sata"),
        ("3060", "rtx-3060-12gb"),
        ("H100", "h100"),
        ("4080", None),  # another card than the 4080 Super
        ("rtx", None),
        ("", None),
    ],
)
def test_presets_are_found_by_common_spellings(typed: str, meant: str | None) -> None:
    assert find_preset(typed) == meant
    for name in preset_names():
        assert find_preset(name) == name
