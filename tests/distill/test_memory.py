"""What fits: fewer questions and shorter lessons where memory is small, an error where it is too small."""

from pathlib import Path

import pytest
import torch

from offspec.core import memory
from offspec.core.errors import CapacityError
from offspec.distill import make as room
from offspec.distill.config import Kind, Wanted
from offspec.distill.embed_head import Ends
from offspec.distill.make import _pupil, questions_together, rows_together
from offspec.distill.medusa import Medusa
from tests.distill.classroom import TAPS, School


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


@pytest.mark.parametrize("kind", ["medusa", "mlp", "eagle3"])
def test_a_head_without_values_has_the_weights_of_a_real_one(school: School, kind: Kind) -> None:
    wanted = Wanted("model", kind, Path("out"), 1000, depth=2, inner=48)
    config = school.target.skeleton.config
    count = len(school.ends.common)
    imagined = Ends.imagined(school.target.skeleton, school.target.dtype, count)
    with torch.device("meta"):
        thought = _pupil(wanted, imagined, TAPS, config)
    real = _pupil(wanted, school.ends, TAPS, config)
    shapes = [[weight.shape for weight in pupil.module.parameters()] for pupil in (thought, real)]
    assert shapes[0] == shapes[1]
    assert imagined.nbytes == school.ends.nbytes
    assert all(weight.is_meta for weight in thought.module.parameters())


def test_first_weights_are_always_the_same_and_leave_random_numbers_alone(school: School) -> None:
    wanted = Wanted("model", "eagle3", Path("out"), 1000, depth=2)
    state = torch.get_rng_state()
    heads = [_pupil(wanted, school.ends, TAPS, school.target.skeleton.config) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), state)
    one, other = (head.module.state_dict() for head in heads)
    assert all(torch.equal(one[name], other[name]) for name in one)
