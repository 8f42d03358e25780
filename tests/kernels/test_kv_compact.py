"""Every path of kv_compact moves the rows it is told to and touches nothing else."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offspec_kernels.backend import Backend
from offspec_kernels.kv_compact import KVTable, kv_compact
from tests.support.kernel_device import device_of

PATHS: list[Backend] = ["reference", "eager", "triton"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]
quick = settings(max_examples=25, deadline=None)


def bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: str) -> Tensor:
    """Numbers of any bits, NaN among them."""
    width = torch.empty((), dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * width), generator=generator, dtype=torch.uint8)
    return raw.to(device).view(dtype)


def within(base: Tensor, heads: int, capacity: int, size: int, batched: bool) -> Tensor:
    """A view of [heads + 1, capacity + 2, size + margin] that leaves a border all round."""
    view = base[1:, 1 : capacity + 1, :size]
    assert view.shape == (heads, capacity, size)
    return view[None] if batched else view


def check(
    path: Backend,
    shapes: list[tuple[int, int, int, bool]],
    start: int,
    rows: list[int],
    dtype: torch.dtype,
) -> None:
    device, capacity = device_of(path).type, max([start, *rows]) + 1
    bases = [
        bits((heads + 1, capacity + extra + 2, size + 3), dtype, seed, device)
        for seed, (heads, size, extra, _) in enumerate(shapes)
    ]
    expected = [base.clone() for base in bases]
    for base, (_, size, _, _) in zip(expected, shapes, strict=True):
        before = base.clone()
        for index, row in enumerate(rows):
            base[1:, 1 + start + index, :size] = before[1:, 1 + row, :size]
    views = [
        within(base, heads, capacity + extra, size, batched)
        for base, (heads, size, extra, batched) in zip(bases, shapes, strict=True)
    ]
    kv_compact(KVTable(views), start, rows, path=path)
    for base, other in zip(bases, expected, strict=True):
        assert torch.equal(base.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("path", PATHS)
@quick
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from([1, 5, 8, 64]), st.integers(0, 2), st.booleans()),
        min_size=1,
        max_size=3,
    ),
    start=st.integers(0, 9),
    offsets=st.sets(st.integers(0, 60), max_size=40),
    dtype=st.sampled_from(DTYPES),
)
def test_rows_move_and_nothing_else(
    path: Backend, shapes: list[Any], start: int, offsets: set[int], dtype: torch.dtype
) -> None:
    check(path, shapes, start, [start + offset for offset in sorted(offsets)], dtype)


@pytest.mark.parametrize("path", PATHS)
def test_overlapping_moves(path: Backend) -> None:
    for rows in ([4, 5, 6], [5, 6, 7], [*range(5, 60)], [4, 5, 9, *range(11, 400, 2)], []):
        check(path, [(2, 8, 0, False), (3, 4, 1, True)], 4, rows, torch.bfloat16)


@pytest.mark.parametrize("path", PATHS)
def test_tensors_of_a_table_may_differ(path: Backend) -> None:
    made = [torch.randn(2, 9, 5), torch.randn(1, 3, 12, 7).half(), torch.empty(0, 9, 4)]
    tensors = [tensor.to(device_of(path)) for tensor in made]
    moved = [tensor.clone() for tensor in tensors]
    table = KVTable(moved)
    assert (table.capacity, table.heads) == (9, 3)
    kv_compact(table, 3, [3, 6, 8], path=path)
    for before, after in zip(tensors, moved, strict=True):
        length = before.shape[-2]
        order = torch.tensor([0, 1, 2, 3, 6, 8, *range(6, length)], device=before.device)
        assert torch.equal(after, before[..., order, :])


def test_words_are_as_large_as_rows_and_strides_allow() -> None:
    assert KVTable([torch.zeros(2, 4, 4)]).word == 8
    assert KVTable([torch.zeros(2, 4, 3)]).word == 4
    assert KVTable([torch.zeros(2, 4, 4), torch.zeros(2, 4, 5).half()]).word == 2
    assert KVTable([torch.zeros(2, 4, 4).half()[:, :, :3]]).word == 2
    assert KVTable([torch.zeros(2, 4, 64)]).size == 32
