"""What fits: fewer questions and shorter lessons where memory is small, an error where it is too small."""

import pytest

from offspec.core import memory
from offspec.core.errors import CapacityError
from offspec.distill import memory as room
from offspec.distill.medusa import Medusa
from offspec.distill.memory import questions_together, rows_together
from tests.distill.classroom import School


def test_questions_fit_in_a_quarter(school: School) -> None:
    given = 1 << 40
    most, taken = questions_together(school.target, 100, given)
    assert most == 128
    each = taken // most
    # Keys and values of 100 positions are the least that one takes.
    assert each > 100 * school.target.cache_bytes(1)
    assert questions_together(school.target, 100, 4 * 20 * each) == (16, 16 * each)
    assert questions_together(school.target, 100, 1)[0] == 1


def test_lessons_are_as_long_as_memory_allows(school: School, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "resident_bytes", lambda: 1_000_000)
    pupil = Medusa(school.ends, 2, 1)
    fixed = 1_000_000 + 16 * sum(weight.numel() for weight in pupil.module.parameters())
    each = room._COPIES * 3 * 4 * len(school.ends.common)
    assert rows_together(pupil, school.ends, None) == 256
    assert rows_together(pupil, school.ends, fixed + 256 * each) == 256
    assert rows_together(pupil, school.ends, fixed + 200 * each) == 128
    with pytest.raises(CapacityError, match="the text is kept") as raised:
        rows_together(pupil, school.ends, fixed + 63 * each)
    assert raised.value.needed == fixed + 64 * each
