"""Memory limits: fewer questions and shorter batches with little memory, an error with too little."""

from pathlib import Path

import pytest
import torch

from offspec.core import memory
from offspec.core.errors import CapacityError
from offspec.distill import distill_head
from offspec.distill.config import DistillConfig, Kind
from offspec.distill.distill_head import _make_student, questions_per_batch, rows_per_batch
from offspec.distill.embed_head import EmbeddingAndHead
from offspec.distill.medusa import MedusaStudent
from tests.distill.classroom import TAPS, School


def test_questions_fit_in_a_quarter(school: School) -> None:
    given = 1 << 40
    most, taken = questions_per_batch(school.target, 100, given)
    assert most == 128
    each = taken // most
    # A question takes at least the KV cache of 100 positions.
    assert each > 100 * school.target.cache_bytes(1)
    assert questions_per_batch(school.target, 100, 4 * 20 * each) == (16, 16 * each)
    assert questions_per_batch(school.target, 100, 1)[0] == 1


def test_batches_are_as_large_as_memory_allows(school: School, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "resident_bytes", lambda: 1_000_000)
    student = MedusaStudent(school.embed_head, 2, 1)
    fixed = 1_000_000 + 16 * sum(weight.numel() for weight in student.module.parameters())
    each = distill_head._COPIES * 3 * 4 * len(school.embed_head.common)
    assert rows_per_batch(student, school.embed_head, None) == 256
    assert rows_per_batch(student, school.embed_head, fixed + 256 * each) == 256
    assert rows_per_batch(student, school.embed_head, fixed + 200 * each) == 128
    with pytest.raises(CapacityError, match="the text is kept") as raised:
        rows_per_batch(student, school.embed_head, fixed + 63 * each)
    assert raised.value.needed == fixed + 64 * each


@pytest.mark.parametrize("kind", ["medusa", "mlp", "eagle3"])
def test_a_head_without_values_has_the_weights_of_a_real_one(school: School, kind: Kind) -> None:
    wanted = DistillConfig("model", kind, Path("out"), 1000, depth=2, inner=48)
    config = school.target.skeleton.config
    count = len(school.embed_head.common)
    placeholder = EmbeddingAndHead.placeholder(school.target.skeleton, school.target.dtype, count)
    with torch.device("meta"):
        without_values = _make_student(wanted, placeholder, TAPS, config)
    real = _make_student(wanted, school.embed_head, TAPS, config)
    shapes = [[weight.shape for weight in student.module.parameters()] for student in (without_values, real)]
    assert shapes[0] == shapes[1]
    assert placeholder.nbytes == school.embed_head.nbytes
    assert all(weight.is_meta for weight in without_values.module.parameters())


def test_first_weights_are_always_the_same_and_leave_random_numbers_alone(school: School) -> None:
    wanted = DistillConfig("model", "eagle3", Path("out"), 1000, depth=2)
    state = torch.get_rng_state()
    heads = [_make_student(wanted, school.embed_head, TAPS, school.target.skeleton.config) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), state)
    one, other = (head.module.state_dict() for head in heads)
    assert all(torch.equal(one[name], other[name]) for name in one)
