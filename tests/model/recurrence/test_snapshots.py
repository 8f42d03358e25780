"""Snapshots kept of a text, and the one from which a shorter text is resumed."""

from itertools import pairwise

import pytest
import torch

from offspec.model.recurrence.snapshots import MOST, SPACING, Snapshot, Snapshots
from offspec.model.recurrence.state import RecurrentState


def _at(length: int) -> Snapshot:
    return Snapshot(length, {(0, 0): RecurrentState(None, torch.full((1, 1, 1), float(length)))})


def _filled(lengths: list[int], most: int = MOST) -> Snapshots:
    snapshots = Snapshots(most)
    for length in lengths:
        snapshots.add(_at(length))
    return snapshots


def test_the_nearest_snapshot_is_the_longest_one_that_fits() -> None:
    snapshots = _filled([20, 50, 90])
    found = snapshots.nearest(89)
    assert found is not None and found.length == 50
    state = found.states[0, 0].state
    assert state is not None and state.item() == 50
    assert snapshots.newest == 50, "later snapshots belong to a dropped text"
    assert snapshots.nearest(19) is None and snapshots.newest == 0


def test_a_text_that_does_not_grow_adds_no_snapshots() -> None:
    assert _filled([50, 50, 20]).lengths == (50,)


@pytest.mark.parametrize("most", [1, 2, MOST])
def test_the_number_of_snapshots_is_limited(most: int) -> None:
    for count in range(1, 30):
        lengths = _filled([7 * i for i in range(1, count + 1)], most).lengths
        assert len(lengths) == min(count, most)
        assert lengths[-1] == 7 * count, "the newest is kept"


def test_the_snapshot_with_the_smallest_gap_is_dropped() -> None:
    assert _filled([100, 110, 200, 300, 400]).lengths == (100, 200, 300, 400)
    assert _filled([100, 200, 290, 300, 310]).lengths == (100, 200, 290, 310)


def test_a_long_text_can_be_resumed_from_near_any_position() -> None:
    snapshots = _filled([SPACING * i for i in range(1, 41)])
    kept = [0, *snapshots.lengths]
    assert max(b - a for a, b in pairwise(kept)) <= SPACING * 40 // 2
