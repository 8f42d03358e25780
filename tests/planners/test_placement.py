"""Placement of layers within a memory limit."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from offspec_planners.memory_division import ExpertNeeds, HeadNeeds, MemoryNeeds, divide, placement_fits
from offspec_planners.placement import (
    Placement,
    Sizes,
    Tier,
    TooSmallError,
    cpu_layers,
    place_layers,
    place_on_devices,
    taken,
)
from offspec_planners.transfer import Links, slowest_transfer_seconds


def _sizes(layers: list[int], grown: int = 0, head: int = 0) -> Sizes:
    return Sizes(tuple(layers), (grown,) * len(layers), head, min(head, max(layers)))


def _used(placement: Placement, sizes: Sizes, block: int = 0) -> int:
    """Peak memory of the placement in the memory used for computation."""
    resident = sum(sizes.kept(i) for i in placement.resident)
    streamed = [sizes.layers[i] for i in range(len(sizes.layers)) if i not in placement.resident]
    if not streamed and not sizes.head:
        return resident
    scratch = max(sizes.extra) if streamed else 0
    return resident + placement.slots * max(*streamed, sizes.block, 0) + scratch


_LAYERS = st.lists(st.integers(1, 100), min_size=1, max_size=40)


_PROCESS = 167_000_000  # bytes
_GROWN, _HEAD, _ROOM = st.integers(0, 50), st.integers(0, 500), st.integers(0, 6000)


@given(_LAYERS, _GROWN, _HEAD, _ROOM)
def test_placement_respects_its_memory_limit(layers: list[int], grown: int, head: int, budget: int) -> None:
    sizes = _sizes(layers, grown, head)
    try:
        placement = place_layers(sizes, budget)
    except TooSmallError as error:
        assert error.needed > budget
        assert _used(place_layers(sizes, error.needed), sizes) <= error.needed
        return
    assert _used(placement, sizes) <= budget
    assert len(placement.tiers) == len(layers) and Tier.HOST not in placement.tiers
    assert placement.head is (Tier.DISK if head else Tier.DEVICE)
    streamed = len(layers) - len(placement.resident) + bool(head)
    assert placement.slots >= min(2, streamed)


def _needs(layers: list[int], grown: int, head: int, logits: int = 2) -> MemoryNeeds:
    streams = HeadNeeds(head, min(head, max(layers)), logits) if head else None
    return MemoryNeeds(
        9, head + 5, 7, 3, 11, layers, [grown] * len(layers), device_runtime_bytes=13, head=streams
    )


def _limit(ram: int) -> int:
    """Return a memory limit that leaves this much for processes."""
    return int(ram / 0.94) + 1


@given(_LAYERS, _GROWN, _HEAD, st.integers(0, 100), _ROOM, st.none() | _ROOM)
def test_placements_fit(
    layers: list[int], grown: int, head: int, logits: int, ram: int, device: int | None
) -> None:
    """In the same memory and in more, and not in less than the stated minimum."""
    needs, given = _needs(layers, grown, head, logits), _limit(ram)
    try:
        placement = divide(given, needs, device)
    except TooSmallError as error:
        assert not placement_fits(given, needs, Placement((Tier.DISK,) * len(layers), 2, 2), device)
        if device is None:
            placement = divide(error.needed, needs)
            assert placement_fits(error.needed, needs, placement)
            assert not placement_fits(given, needs, placement)
        return
    assert placement_fits(given, needs, placement, device)
    assert placement_fits(given + 1000, needs, placement, None if device is None else device + 1000)


_SLOT, _COUNT, _WIDE = st.integers(1, 40), st.integers(1, 60), st.integers(0, 9000)


def _with_experts(
    dense: list[int], grown: int, head: int, slot: int, count: int, beside: int = 0
) -> tuple[MemoryNeeds, ExpertNeeds]:
    """Needs of a MoE model whose experts can be loaded on demand, and the experts."""
    needs = _needs([size + count * slot for size in dense], grown, head)
    experts = ExpertNeeds(
        dense, needs.extra_bytes, slot, count * len(dense), copied_bytes=5, cpu_bytes=beside
    )
    return replace(needs, experts=experts), experts


@given(_LAYERS, _GROWN, _SLOT, _COUNT, _HEAD, _WIDE)
def test_experts_are_loaded_on_demand_if_not_everything_fits(
    dense: list[int], grown: int, slot: int, count: int, head: int, ram: int
) -> None:
    """Everything else is placed first; the remainder caches experts, and no space for another is wasted."""
    (needs, apart), given = _with_experts(dense, grown, head, slot, count), _limit(ram)
    try:
        placement = divide(given, needs)
    except TooSmallError as error:
        assert error.needed > given
        assert placement_fits(error.needed, needs, divide(error.needed, needs))
        return
    assert placement_fits(given, needs, placement) and placement_fits(given + 1000, needs, placement)
    more = replace(placement, expert_slots=placement.expert_slots + 1)
    assert not placement_fits(given, replace(needs, experts=None), more)
    try:
        streamed = divide(given, replace(needs, experts=None))
    except TooSmallError:
        assert placement.expert_slots
    else:
        assert bool(streamed.slots) >= bool(placement.expert_slots), "what fits as it is stays so"
    if 0 < placement.expert_slots < apart.count:
        assert placement.expert_slots >= apart.least and not placement_fits(given, needs, more)


@given(_LAYERS, _GROWN, _SLOT, _COUNT, _HEAD, _WIDE, _WIDE, st.booleans())
@example([1], 0, 1, 1, 5, 18, 45, False)  # streams whole, since separate experts would not fit
def test_experts_on_a_device_have_slots_in_ram(
    dense: list[int], grown: int, slot: int, count: int, head: int, ram: int, device: int, cpu: bool
) -> None:
    """Neither memory is exceeded, nor has space for another expert that is left out.

    Experts that the CPU computes take no memory of the device, but workspace in RAM.
    """
    (needs, apart), given = _with_experts(dense, grown * (not cpu), head, slot, count, 77 * cpu), _limit(ram)
    try:
        placement = divide(given, needs, device, cpu_experts=cpu)
    except TooSmallError as error:
        assert error.needed > error.given in (given, device)
        return
    assert placement_fits(given, needs, placement, device)
    assert placement_fits(given + 1000, needs, placement, device + 1000)
    near, behind = placement.expert_slots, placement.host_expert_slots
    if cpu:
        assert placement.cpu_experts and placement.on_demand_experts
        assert not placement_fits(given, needs, placement)
        wider = replace(needs, experts=replace(apart, cpu_bytes=77 + given))
        assert not placement_fits(given, wider, placement, device)
    elif not near:
        assert placement == divide(given, replace(needs, experts=None), device), "what fits as it is stays so"
        least = replace(placement, expert_slots=apart.least, host_expert_slots=apart.least)
        assert not placement.slots or not placement_fits(given, needs, least, device)
        return
    elif near == apart.count:
        assert behind == apart.least, "experts of the device only pass through RAM"
        return
    else:
        assert apart.least <= near < apart.count
        assert not placement_fits(given, needs, replace(placement, expert_slots=near + 1), device)
    assert apart.least <= behind <= apart.count
    more = replace(placement, host_expert_slots=behind + 1)
    assert behind == apart.count or not placement_fits(given, needs, more, device)


def test_more_memory_keeps_more_layers_evenly_spread() -> None:
    sizes = _sizes([10] * 30)
    counts = [len(place_layers(sizes, budget).resident) for budget in range(20, 400, 10)]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 30
    resident = place_layers(sizes, 130).resident
    gaps = [b - a for a, b in pairwise(resident)]
    assert len(resident) == 10 and max(gaps) - min(gaps) <= 1


@given(_LAYERS, _GROWN, _HEAD, _ROOM, _ROOM, st.integers(0, 40))
def test_two_memories_respect_their_limits(
    layers: list[int], grown: int, head: int, device: int, host: int, wanted: int
) -> None:
    """The number of CPU layers is set, and they lie in RAM as they are computed."""
    sizes, beside = _sizes(layers, grown, head), cpu_layers(len(layers), wanted)
    try:
        placement = place_on_devices(sizes, [device], host, cpu=beside)
    except TooSmallError as error:
        assert error.needed > (device if error.where is Tier.DEVICE else host)
        if error.where is Tier.HOST:
            assert place_on_devices(sizes, [device], error.needed, cpu=beside).layers(Tier.CPU) == beside
        return
    assert placement.layers(Tier.CPU) == beside and len(set(beside)) == min(wanted, len(layers))
    ((on_device, *_), in_ram) = taken(sizes, placement)
    assert on_device <= device and in_ram <= host
    lie = sum(sizes.layers[layer] for layer in placement.layers(Tier.HOST))
    lie += sum(sizes.kept(layer) for layer in beside) + (head if placement.head is Tier.HOST else 0)
    assert in_ram >= lie + placement.staging * sizes.slot
    if not beside:
        assert _used(placement, sizes) <= device
    reads = bool(placement.layers(Tier.DISK)) or placement.head is Tier.DISK
    assert placement.staging >= (2 if reads else 0) and (placement.head is Tier.DEVICE) == (not head)
    assert (placement.slots > 0) == any(tier.streams for tier in (*placement.tiers, placement.head))


@given(
    *(_LAYERS, _GROWN, st.integers(0, 300), st.integers(0, 20)),
    *(st.lists(st.integers(0, 3000), min_size=2, max_size=4), _ROOM, st.integers(0, 10)),
)
def test_several_gpus_respect_their_limits(
    layers: list[int], grown: int, head: int, cache: int, rooms: list[int], host: int, wanted: int
) -> None:
    sizes, beside = _sizes(layers, grown, head), cpu_layers(len(layers), wanted)
    try:
        placement = place_on_devices(sizes, rooms, host, cache=cache, cpu=beside)
    except TooSmallError as error:
        assert error.needed > (min(rooms) if error.where is Tier.DEVICE else host)
        return
    devices, in_ram = taken(sizes, placement, cache)
    assert all(used <= room for used, room in zip(devices, rooms, strict=False)) and in_ram <= host
    assert len(placement.gpus) == len(layers) and placement.gpu_count <= len(rooms)
    assert placement.layers(Tier.CPU) == beside
    streamed = [placement.gpu_of(layer) for layer, tier in enumerate(placement.tiers) if tier.streams]
    assert streamed == [place % len(rooms) for place in range(len(streamed))], "every link has its turn"
    if not streamed:
        own = [placement.gpu_of(layer) for layer, tier in enumerate(placement.tiers) if tier is not Tier.CPU]
        assert own == sorted(own), "where all stays, each GPU has a run of layers"


def test_two_gpus_keep_twice_as_many_layers() -> None:
    sizes = _sizes([10] * 40)
    one, two = place_on_devices(sizes, [130], 400), place_on_devices(sizes, [130, 130], 400)
    assert len(two.resident) == 2 * len(one.resident) == 20
    assert [two.gpus.count(gpu) for gpu in (0, 1)] == [20, 20]
    links = Links(1.0, 1.0)
    alone, both = (slowest_transfer_seconds(sizes.layers, 0, placement, links) for placement in (one, two))
    assert both[0] == 100.0 and alone[0] == 300.0, "a third of the layers on two links"
    whole = place_on_devices(sizes, [250, 170], 0)
    assert whole.resident == tuple(range(40)) and whole.slots == 0 and whole.gpu_transfers == 2
    assert [whole.gpus.count(gpu) for gpu in (0, 1)] == [25, 15]


def test_fastest_tiers_are_filled_first() -> None:
    sizes = _sizes([10] * 12)
    assert place_on_devices(sizes, [120], 0).tiers == (Tier.DEVICE,) * 12
    placement = place_on_devices(sizes, [70], 80)
    counts = [len(placement.layers(tier)) for tier in Tier]
    assert counts == [4, 0, 8, 0] and placement.staging == 0
    placement = place_on_devices(sizes, [70], 70)
    counts = [len(placement.layers(tier)) for tier in Tier]
    assert counts == [4, 0, 4, 4] and placement.staging == 3
    disk = placement.layers(Tier.DISK)
    assert max(b - a for a, b in pairwise(disk)) <= 4, "disk layers are spread, so that the disk has time"


def test_misfit_lists_the_parts() -> None:
    needs = MemoryNeeds(_PROCESS, 10**7, 10**7, 10**7, 0, [10**7] * 4, [0] * 4)
    with pytest.raises(TooSmallError) as caught:
        divide(10**8, needs)
    parts = {name: size for name, size in caught.value.parts.items() if size}
    assert list(parts)[:2] == ["Python and libraries", "head and norms"] and parts["head and norms"] == 10**7
    assert sum(parts.values()) == caught.value.needed and caught.value.given == 10**8
    assert divide(caught.value.needed, needs).slots == 2
    assert divide(10**10, needs).slots == 0


def test_head_streams_if_it_does_not_fit() -> None:
    head = HeadNeeds(9 * 10**8, 10**7, 10**6)
    needs = MemoryNeeds(_PROCESS, 10**9, 10**7, 10**7, 0, [10**7] * 4, [0] * 4, head=head)
    assert divide(2 * 10**9, needs).head is Tier.DEVICE
    streamed = divide(5 * 10**8, needs)
    assert streamed.head is Tier.DISK and streamed.slots >= 2
    with pytest.raises(TooSmallError) as caught:
        divide(10**8, needs)
    assert caught.value.needed < 5 * 10**8, "the least is that of a head that streams"
    assert divide(caught.value.needed, needs).head is Tier.DISK


def test_third_slot_precedes_a_resident_head() -> None:
    head = HeadNeeds(2 * 10**7, 10**7)
    needs = MemoryNeeds(_PROCESS, 3 * 10**7, 0, 0, 0, [10**7] * 9, [0] * 9, head=head)
    found = [divide(size * 10**6, needs) for size in (212, 228, 240, 244, 300)]
    assert [placement.slots for placement in found] == [2, 3, 3, 3, 3]
    assert [placement.head is Tier.DEVICE for placement in found] == [False, False, False, True, True]


def test_device_and_ram_are_distinguished() -> None:
    needs = MemoryNeeds(_PROCESS, 10**8, 10**7, 10**7, 0, [10**7] * 40, [0] * 40, device_runtime_bytes=10**8)
    placement = divide(4 * 10**8, needs, 3 * 10**8)
    assert all(placement.layers(tier) for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK))
    with pytest.raises(TooSmallError) as caught:
        divide(10**9, needs, 2 * 10**8)
    assert caught.value.where is Tier.DEVICE and caught.value.given == 2 * 10**8
    with pytest.raises(TooSmallError) as caught:
        divide(18 * 10**7, needs, 3 * 10**8)
    assert caught.value.where is Tier.HOST and caught.value.given == 18 * 10**7
    assert divide(caught.value.needed, needs, 3 * 10**8).staging == 2
