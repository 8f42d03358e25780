"""Costs of passes: the closed form compared with a simulation of the rings, and seconds from profiles."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offspec_planners.cost import (
    ROWS,
    Estimate,
    ModelSizes,
    PassCosts,
    cpu_layer_seconds,
    draft_step,
    layer_seconds,
    prefill_seconds,
    product_seconds,
    unpacking_seconds,
)
from offspec_planners.hardware_rates import Hardware, Processor, Rate, preset, preset_names
from offspec_planners.measured_costs import MeasuredCosts
from offspec_planners.placement import (
    Placement,
    Sizes,
    Tier,
    TooSmallError,
    cpu_layers,
    place_layers,
    place_on_devices,
)
from offspec_planners.transfer import streamed_units
from offspec_planners.tree_growth import best_size, cost_table
from tests.planners.ring_simulation import Unit, seconds_per_pass

GB = 10**9
CARDS = [name for name in preset_names() if preset(name).link is not None]


def _model(layers: int, weights: int, head: float = 0.0) -> ModelSizes:
    """A model of `layers` layers with `weights` 16-bit weights each; head: its size in layers."""
    return ModelSizes(
        name="model",
        layers=(2 * weights,) * layers,
        weights=weights,
        head=int(2 * weights * head),
        head_weights=int(weights * head),
        kv_per_token=1000 * layers,
        attention=32768,
        hidden=8192,
        vocabulary=128_256,
    )


LARGE = _model(80, 856_000_000, 1.23)  # Llama 70B
WIDE = _model(30, 56_600_000, 2.0)  # SmolLM2-135M widened by 4
DRAFT = replace(_model(16, 60_800_000, 4.3), name="draft", hidden=2048)


@st.composite
def _placed(draw: st.DrawFn, model: ModelSizes, apart: bool) -> Placement:
    """A placement in random memory, from barely enough to nearly all."""
    stays = draw(st.booleans())
    size = model.layers[0]
    sizes = Sizes(
        model.layers,
        (0,) * len(model.layers),
        0 if stays else model.head,
        0 if stays else min(model.head, size),
    )
    near = int(size * (draw(st.floats(2, 4)) + draw(st.floats(0, 0.97)) * len(model.layers)))
    far = int(size * draw(st.floats(2, 4 + len(model.layers))))
    count = len(model.layers)
    beside = cpu_layers(count, draw(st.integers(0, count // 2)) if apart and draw(st.booleans()) else 0)
    far += size * len(beside)
    try:
        return place_on_devices(sizes, [near], far, cpu=beside) if apart else place_layers(sizes, near)
    except TooSmallError:
        return place_layers(sizes, 10**15)


@st.composite
def _machines(draw: st.DrawFn, apart: bool) -> Hardware:
    speed = 10 ** draw(st.floats(10, 14))
    processor = Processor(
        "chip",
        10**12,
        Rate.exactly(draw(st.floats(1e10, 1e12))),
        ((64, speed / 2), (1024, speed)),
        draw(st.floats(0, 1e-3)),
    )
    disk = Rate.exactly(10 ** draw(st.floats(8.5, 10)))
    link = Rate.exactly(10 ** draw(st.floats(9.7, 10.8))) if apart else None
    ram = Rate.exactly(draw(st.floats(3e10, 2e11)))
    host = Processor("cpu", 10**12, ram, ((1, 1e10), (64, 1e12)), 1e-4) if apart else None
    return Hardware("machine", 10**12, disk, link, processor, host=host)


def _units(
    hardware: Hardware,
    model: ModelSizes,
    placement: Placement,
    layer: float,
    head: float,
    cpu: float = 0.0,
) -> list[Unit]:
    """Units for the simulation. layer, head, cpu: seconds to compute a layer, the head, or on the CPU."""

    def unit(size: int, tier: Tier, compute: float) -> Unit:
        if not tier.streams:
            return Unit(cpu if tier is Tier.CPU else compute)
        read = size / hardware.disk.value if tier is Tier.DISK else 0.0
        return Unit(compute, read, size / hardware.link.value if hardware.link else 0.0)

    layers = zip(model.layers, placement.tiers, strict=True)
    units = [unit(size, tier, layer) for size, tier in layers]
    if placement.head is not Tier.DEVICE:
        blocks = streamed_units(model.layers, model.head, placement)
        blocks = blocks[sum(tier.streams for tier in placement.tiers) :]
        units += [unit(block.size, placement.head, head * block.size / model.head) for block in blocks]
    return units


def _relative_error(
    hardware: Hardware, model: ModelSizes, placement: Placement, rows: int, share: float, walked: float = 4.0
) -> float:
    """Relative error of an estimate against the simulation. share: the draft's part of the total time."""
    costs = Estimate(hardware, None).costs(model, placement, walked)
    draft = share * max(float(costs.compute_seconds(rows)), costs.link)
    processor = hardware.processor
    head, around = product_seconds(processor, model.head_weights, rows), 0.0
    if placement.head is Tier.DEVICE:
        head, around = 0.0, min(rows, walked) * product_seconds(processor, model.head_weights, 2)
    layer = layer_seconds(processor, model, rows, 128)
    cpu = 0.0
    if placement.layers(Tier.CPU):
        assert hardware.host is not None and hardware.link is not None
        copied = hardware.link.value if placement.slots else 0.0
        cpu = cpu_layer_seconds(hardware.host, model, rows, 128, copied)
    units = _units(hardware, model, placement, layer, head, cpu)
    simulated = seconds_per_pass(units, draft, around, placement.slots, placement.staging)
    return float(costs.iteration(draft, rows)) / simulated - 1.0


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    layers=st.integers(8, 90),
    head=st.sampled_from([0.3, 1.0, 1.23, 2.6]),
    rows=st.sampled_from(ROWS),
    share=st.sampled_from([0.0, 0.05, 0.2, 0.5, 0.9, 1.5]),
    apart=st.booleans(),
)
def test_pass_times_match_the_simulation(
    data: st.DataObject, layers: int, head: float, rows: int, share: float, apart: bool
) -> None:
    """Never longer, since every term is a lower bound; and rarely shorter by as much as this allows."""
    model = _model(layers, 100_000_000, head)
    hardware, placement = data.draw(_machines(apart)), data.draw(_placed(model, apart))
    assert -0.1 < _relative_error(hardware, model, placement, rows, share) < 5e-3


CPU = Hardware(
    "laptop",
    16 * GB,
    Rate.exactly(2e9),
    None,
    Processor("8 cores", 16 * GB, Rate.exactly(2e10), ((1, 1e10), (64, 2.5e11), (512, 3e11)), 2e-4),
)


@pytest.mark.parametrize(("card", "host"), [("rtx-3060-12gb", 10), ("rtx-4090", 45), ("h100", 230)])
def test_large_model_on_a_gpu(card: str, host: int) -> None:
    hardware = preset(card)
    placement = place_on_devices(
        Sizes(LARGE.layers, (0,) * 80), [hardware.processor.memory - 3 * GB], host * GB
    )
    for rows, share in ((1, 0.05), (256, 1.0), (1024, 0.05)):
        assert _relative_error(hardware, LARGE, placement, rows, share) == pytest.approx(0.0, abs=0.02)


@pytest.mark.parametrize(("resident", "head"), [(0, Tier.DISK), (5, Tier.DEVICE), (27, Tier.DISK)])
def test_small_model_from_disk(resident: int, head: Tier) -> None:
    kept = [int((place + 0.5) * 30 / resident) for place in range(resident)]
    placement = Placement.in_memory(30, kept, 3, head)
    for rows, share in ((1, 0.02), (96, 0.6), (512, 0.2)):
        assert _relative_error(CPU, WIDE, placement, rows, share) == pytest.approx(0.0, abs=0.02)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), rows=st.sampled_from([2, 64, 512]), share=st.sampled_from([0.0, 0.2, 0.8]))
def test_measured_parts_match_the_simulation(data: st.DataObject, rows: int, share: float) -> None:
    """Layers are read from disk, and others are resident; the test after this has two links."""
    placement = data.draw(_placed(WIDE, apart=False))
    layer, around, walk = 0.04, 0.03, 0.02
    measured = MeasuredCosts(((rows, layer),), ((rows, around),), walk, link=CPU.disk)
    costs = measured.costs(WIDE, placement, walked=8.0)
    draft = share * max(float(costs.compute_seconds(rows)), costs.link)
    units = _units(CPU, WIDE, placement, layer, layer * WIDE.head_weights / WIDE.weights)
    simulated = seconds_per_pass(units, draft, around + 8 * walk, placement.slots, 0)
    assert float(costs.iteration(draft, rows)) == pytest.approx(simulated, rel=0.03)


@pytest.mark.parametrize(("host", "near"), [(0.0, 0.03), (0.7, 0.15), (1.0, 0.03)])
@pytest.mark.parametrize("share", [0.0, 0.8])
def test_one_measured_rate_stands_for_two_links(host: float, near: float, share: float) -> None:
    """host: share of the layers in RAM. With 0.7 both links take the same time: the worst case."""
    hardware = preset("rtx-4090")
    sizes = Sizes(LARGE.layers, (0,) * 80)
    placement = place_on_devices(sizes, [12 * GB], int(sum(LARGE.layers) * host) + 6 * GB)
    estimate = Estimate(hardware, None).costs(LARGE, placement, 8.0)
    streamed = sum(unit.size for unit in streamed_units(LARGE.layers, LARGE.head, placement))
    measured = MeasuredCosts(
        ((256, 0.004),), ((256, 0.01),), 0.001, link=Rate.exactly(streamed / estimate.link)
    )
    costs = measured.costs(LARGE, placement, walked=8.0)
    assert costs.link == pytest.approx(estimate.link)
    draft = share * costs.link
    units = _units(hardware, LARGE, placement, 0.004, 0.0)
    simulated = seconds_per_pass(units, draft, 0.018, placement.slots, placement.staging)
    assert float(costs.iteration(draft, 256)) == pytest.approx(simulated, rel=near)


def test_packed_target_has_fewer_bytes_and_more_computation() -> None:
    """Computed from the rate of a profile's memory, or from the measured time per value."""
    bits = 4.25
    packed = WIDE.packed_in(bits)
    assert packed.unpacked == pytest.approx(WIDE.weights, rel=1e-4) and WIDE.unpacked == 0
    moved = WIDE.weights * (2 + bits / 8)
    assert packed.unpacked_once().unpacked == 0 and packed.unpacked_once().layers == packed.layers
    assert unpacking_seconds(CPU.processor, packed) == pytest.approx(
        moved / CPU.processor.bandwidth.value, 1e-4
    )
    assert unpacking_seconds(CPU.processor, WIDE) == 0
    streams = Placement.in_memory(30, range(5), 3)
    measured = MeasuredCosts(
        ((1, 0.04), (64, 0.05)), ((1, 0.01), (64, 0.01)), 0.002, link=CPU.disk, unpack=1e-9
    )
    for pricing in (measured, Estimate(CPU, None)):
        before, after = pricing.costs(WIDE, streams, 4), pricing.costs(packed, streams, 4)
        assert after.link == pytest.approx(before.link * bits / 16, rel=0.05)
        more = float(after.compute_seconds(64) - before.compute_seconds(64))
        each = 1e-9 * packed.unpacked if pricing is measured else unpacking_seconds(CPU.processor, packed)
        assert more == pytest.approx(30 * each, rel=1e-3)


def test_cpu_layers_save_their_transfer() -> None:
    """With a link, the CPU uses the remaining RAM bandwidth; if it computes all layers, nothing streams."""
    hardware, sizes = preset("rtx-4090-256gb"), Sizes(LARGE.layers, (0,) * 80)
    seconds = dict[int, float]()
    for wanted in (0, 20, 40, 60):
        placement = place_on_devices(sizes, [20 * GB], 240 * GB, cpu=cpu_layers(80, wanted))
        costs = Estimate(hardware, None).costs(LARGE, placement, 1.0)
        assert len(placement.layers(Tier.CPU)) == wanted
        streamed = sum(tier.streams for tier in placement.tiers)
        assert costs.link == pytest.approx(streamed * LARGE.layers[0] / 25e9)
        seconds[wanted] = float(costs.iteration(0.0, 1))
    assert hardware.host is not None
    alone, beside = (cpu_layer_seconds(hardware.host, LARGE, 1, 128, copied) for copied in (0.0, 25e9))
    assert alone > LARGE.layers[0] / hardware.host.bandwidth.value
    assert beside / alone == pytest.approx(153 / 128, rel=0.05)
    assert seconds[60] < seconds[40] < seconds[20] < seconds[0], "in such RAM the CPU is faster than PCIe"
    assert cpu_layer_seconds(hardware.host, LARGE, 512, 128) > 2 * LARGE.layers[0] / 25e9


def test_measured_cpu_layers_are_used() -> None:
    host = preset("rtx-4090").host
    measured = MeasuredCosts(((1, 1e-3), (64, 2e-3)), ((1, 0.01), (64, 0.01)), 0.0, link=CPU.disk, host=host)
    placement = Placement((Tier.DEVICE,) * 10 + (Tier.CPU,) * 20, 0)
    assert host is not None
    expected = [10 * each + 20 * cpu_layer_seconds(host, WIDE, rows, 512) for rows, each in measured.layer]
    found = [seconds - 0.01 for _, seconds in measured.costs(WIDE, placement, 1.0).compute]
    assert found == pytest.approx(expected)
    tried = replace(measured, host=None, cpu=((1, 0.02), (64, 0.05)))
    found = [seconds - 0.01 for _, seconds in tried.costs(WIDE, placement, 1.0).compute]
    assert found == pytest.approx([10 * 1e-3 + 20 * 0.02, 10 * 2e-3 + 20 * 0.05])
    assert measured.knows_cpu and tried.knows_cpu and not replace(measured, host=None).knows_cpu


def test_faster_link_helps_only_if_something_streams() -> None:
    measured = MeasuredCosts(((1, 0.04), (64, 0.05)), ((1, 0.01), (64, 0.01)), 0.002, link=Rate.exactly(2e9))
    streams = Placement.in_memory(30, range(5), 3)
    stays = Placement.in_memory(30, range(30), 0)
    for pricing in (measured, Estimate(CPU, None)):
        fast = pricing.with_faster_link(2.0)
        assert fast.costs(WIDE, streams, 4).link == pytest.approx(pricing.costs(WIDE, streams, 4).link / 2)
        assert fast.costs(WIDE, stays, 4) == pricing.costs(WIDE, stays, 4)
        assert pricing.costs(WIDE, stays, 4).link == 0.0


def test_costs_are_monotonic_and_bounded_by_their_parts() -> None:
    rows, widths = np.arange(1, 5000, 7), np.arange(1, 200)
    for name in CARDS:
        placement = place_on_devices(
            Sizes(LARGE.layers, (0,) * 80), [preset(name).processor.memory - 3 * GB], 200 * GB
        )
        costs = Estimate(preset(name), DRAFT).costs(LARGE, placement, 8.0)
        for seconds in (
            costs.compute_seconds(rows),
            costs.step_seconds(widths),
            costs.pass_seconds(rows),
            costs.iteration(0.3, rows),
            costs.iteration(np.linspace(0, 10, 50), 64),
        ):
            assert (np.diff(seconds) >= -1e-12).all(), name
        for draft in (0.0, 0.5, 20.0):
            found = float(costs.iteration(draft, 64))
            alone = draft + float(costs.compute_seconds(64))
            assert max(alone, costs.link) <= found <= alone + costs.link + 1e-9
            assert (costs.bound(draft, 64) == "link") == (found > alone)


def test_computation_is_memory_bound_and_then_compute_bound() -> None:
    processor = preset("rtx-4090").processor
    few, many = product_seconds(processor, 10**9, 1), product_seconds(processor, 10**9, 4096)
    assert few == pytest.approx(2e9 / processor.bandwidth.value)
    assert few == product_seconds(processor, 10**9, 16)
    assert many == pytest.approx(2e9 * 4096 / processor.flops(4096))
    assert product_seconds(processor, 2 * 10**9, 4096) == pytest.approx(2 * many)
    near, far = (layer_seconds(processor, LARGE, 256, prefix) for prefix in (128, 16384))
    assert near < far < 2 * near, "attention grows with what it looks back on"


def test_draft_step_reads_its_weights_once() -> None:
    processor = preset("rtx-4090").processor
    narrow = draft_step(processor, DRAFT, 1)
    weights = 2 * DRAFT.parameters / processor.bandwidth.value
    assert weights < narrow < 3 * weights + len(DRAFT.layers) * processor.layer_overhead
    assert draft_step(processor, DRAFT, 64) < 2 * narrow
    packed = [draft_step(processor, DRAFT, 1, bits) for bits in (2, 3, 4)]
    assert narrow < packed[0] < packed[1] < packed[2]
    multiplied = draft_step(processor, DRAFT, 1, 4, unpacks=False)
    assert weights / 5 < multiplied < narrow, "a quarter of the bytes and a bit"
    assert draft_step(processor, _model(32, 218_000_000, 2.4), 1) > 2 * narrow


def test_no_draft_costs_without_a_draft() -> None:
    placement = Placement.in_memory(30, range(5), 3)
    costs = Estimate(CPU, None).costs(WIDE, placement, 1.0)
    assert costs.draft_seconds(()) == 0.0 == costs.draft_seconds((8, 8))
    drafting = Estimate(CPU, DRAFT).costs(WIDE, placement, 1.0)
    assert drafting.draft_seconds(()) == 0.0
    one, two = drafting.draft_seconds((8,)), drafting.draft_seconds((8, 8))
    assert two - one == pytest.approx(float(drafting.step_seconds(8)))


def test_prompt_takes_one_weight_transfer_until_computation_dominates() -> None:
    placement = Placement.in_memory(30, range(5), 3)
    costs = Estimate(CPU, None).costs(WIDE, placement, 1.0)
    seconds = [prefill_seconds(costs, WIDE, CPU.processor, tokens) for tokens in (1, 64, 1024, 8192, 16384)]
    assert seconds[0] == costs.link and seconds == sorted(seconds)
    assert seconds[-1] > 2 * seconds[-2] > 4 * seconds[2] > 4 * costs.link


def test_draft_time_is_hidden_only_if_transfer_bound() -> None:
    seen = PassCosts(compute=((1, 0.2), (101, 2.2)), step=((1, 0.1),), link=1.5, rest=1.2, hidden=0.5)
    plain = replace(seen, hidden=0.0)
    assert seen.is_transfer_bound(30) and not seen.is_transfer_bound(90)
    assert float(seen.iteration(1.0, 30)) == pytest.approx(float(plain.iteration(0.5, 30)))
    assert float(seen.iteration(1.0, 90)) == float(plain.iteration(1.0, 90))
    table = cost_table(seen, 100, 4)
    for rows in (1, 30, 65, 66, 90):
        assert float(table.iteration(0.7, rows)) == pytest.approx(float(seen.iteration(0.7, rows)))
    assert seen.for_sequences(2).hidden == 0.0


@pytest.mark.parametrize("link", [0.0, 4.0])
def test_tree_after_a_prompt_costs_only_its_rows(link: float) -> None:
    """The prompt's time is needed in any case; a token saves a part of a later pass."""
    costs = PassCosts(((1, 1.0), (64, 1.0), (512, 5.0)), ((1, 0.01),), 0.1, link, link)
    short, long = costs.behind(8), costs.behind(480)
    once = float(costs.iteration(0.0, 1))
    assert float(short.iteration(0.0, 1)) == float(long.iteration(0.0, 1)) == once
    for rows in (2, 33, 64, 100):
        more = float(costs.pass_seconds(480 + rows) - costs.pass_seconds(481))
        assert float(long.iteration(0.0, rows)) == pytest.approx(once + more)
        assert float(short.iteration(0.0, rows)) <= float(long.iteration(0.0, rows))
    assert float(long.iteration(0.3, 9)) == pytest.approx(0.3 + float(long.iteration(0.0, 9)))
    scores = np.log(0.5 ** np.arange(12))
    assert best_size(scores, 0.1, long) < best_size(scores, 0.1, short)
