"""Placing layers under a budget, and reading sizes."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offspec import RequestError, memory
from offspec.config import format_bytes, parse_bytes
from offspec.errors import CapacityError
from offspec_planners.placement import Placement, TooSmallError, place_layers


def _used(placement: Placement, layers: list[int], extra: list[int]) -> int:
    """What the arrangement takes at its worst."""
    resident = sum(layers[i] + extra[i] for i in placement.resident)
    streamed = [i for i in range(len(layers)) if i not in placement.resident]
    if not streamed:
        return resident
    return resident + placement.slots * max(layers[i] for i in streamed) + max(extra[i] for i in streamed)


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=40),
    st.integers(0, 50),
    st.integers(0, 6000),
)
def test_a_placement_keeps_to_its_budget(layers: list[int], grown: int, budget: int) -> None:
    extra = [grown] * len(layers)
    try:
        placement = place_layers(layers, extra, budget)
    except TooSmallError as error:
        assert error.needed > budget
        assert _used(place_layers(layers, extra, error.needed), layers, extra) <= error.needed
        return
    assert _used(placement, layers, extra) <= budget
    assert len(set(placement.resident)) == len(placement.resident)
    assert all(0 <= index < len(layers) for index in placement.resident)
    if len(placement.resident) < len(layers):
        assert placement.slots >= min(2, len(layers) - len(placement.resident))


def test_more_memory_keeps_more_layers_spread_out() -> None:
    counts = [len(place_layers([10] * 30, [0] * 30, budget).resident) for budget in range(20, 400, 10)]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 30
    resident = place_layers([10] * 30, [0] * 30, 130).resident
    gaps = [b - a for a, b in pairwise(resident)]
    assert len(resident) == 10 and max(gaps) - min(gaps) <= 1


def test_what_does_not_fit_lists_the_parts() -> None:
    needs = memory.Needs(10**8, 10**7, 10**7, 10**7, 0, [10**7] * 4, [0] * 4)
    with pytest.raises(
        CapacityError, match=r"Python and libraries .* MB, head and norms 10\.00 MB"
    ) as caught:
        memory.divide(10**8, needs)
    assert memory.divide(caught.value.needed, needs).slots == 2
    assert memory.divide(10**10, needs).slots == 0


def test_this_process_has_a_size() -> None:
    assert 10**6 < memory.resident_bytes() <= memory.peak_bytes() < 10**12
    assert memory.available_bytes() > 10**6
    memory.trim()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1.5GB", 1_500_000_000),
        ("800MiB", 800 * 2**20),
        ("12g", 12 * 10**9),
        ("4096", 4096),
        (" 2 kb ", 2000),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1.5 parsecs", "0", "1e9", "5iB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(RequestError):
        parse_bytes(text)


def test_sizes_are_written() -> None:
    assert [format_bytes(n) for n in (0, 999, 1500, 2_500_000, 1_500_000_000, 3e12)] == [
        "0 B",
        "999 B",
        "2 KB",
        "2.50 MB",
        "1.50 GB",
        "3.00 TB",
    ]
