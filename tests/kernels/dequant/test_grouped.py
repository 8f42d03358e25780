"""offspec's own groups of 64, value for value as their layout says, on every path."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offspec_kernels.backend import Backend
from offspec_kernels.dequant.grouped import BITS, GROUP, Grouped, pack_codes, unpack_codes
from offspec_kernels.errors import ArgumentError
from tests.kernels.dequant.scaled_cases import PATHS, check, scales


def make(bits: int, shape: tuple[int, int], seed: int = 0, odd: float = 0.0) -> dict[str, Tensor]:
    """Random bytes, with scales of which a share `odd` is unusual."""
    parts = Grouped(bits).parts(shape)
    generator = torch.Generator().manual_seed(seed)
    return {
        "codes": torch.randint(0, 256, parts["codes"].shape, generator=generator, dtype=torch.uint8),
        "step": scales(seed + 1, torch.float16, *parts["step"].shape, odd=odd),
        "offset": scales(seed + 2, torch.float16, *parts["offset"].shape, odd=odd),
    }


def code_of(bits: int, group: list[int], index: int) -> int:
    """Where the module's description says that a code is."""
    if bits == 8:
        return group[index]
    if bits == 4:
        return group[index % 32] >> (4 * (index // 32)) & 15
    low = group[index % 16] >> (2 * (index // 16)) & 3
    return low if bits == 2 else low | (group[16 + index % 8] >> (index // 8) & 1) << 2


def one_by_one(bits: int, parts: dict[str, Tensor], shape: tuple[int, int]) -> Tensor:
    groups = parts["codes"].view(-1, 8 * bits).tolist()
    step, offset = (parts[name].float().view(-1).numpy() for name in ("step", "offset"))
    values = np.empty((len(groups), GROUP), np.float32)
    with np.errstate(all="ignore"):
        for place, group in enumerate(groups):
            for index in range(GROUP):
                product = np.float32(code_of(bits, group, index)) * step[place]
                values[place, index] = product + offset[place]
    return torch.from_numpy(values).view(shape)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bits", BITS)
def test_as_described(bits: int, path: Backend) -> None:
    shape = (7, 192)  # 21 groups: more than the loops take at once, and no multiple of it
    parts = make(bits, shape)
    check(Grouped(bits), parts, shape, one_by_one(bits, parts, shape), path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(0, 5), groups=st.integers(0, 3), seed=st.integers(0, 9), odd=st.sampled_from([0.0, 0.5])
)
def test_any_shape_and_scales(
    bits: int, path: Backend, rows: int, groups: int, seed: int, odd: float
) -> None:
    shape = (rows, groups * GROUP)
    parts = make(bits, shape, seed, odd)
    check(Grouped(bits), parts, shape, one_by_one(bits, parts, shape), path)


@pytest.mark.parametrize("bits", BITS)
def test_codes_at_any_address(bits: int) -> None:
    shape = (3, 128)
    parts = make(bits, shape)
    memory = torch.zeros(parts["codes"].numel() + 3, dtype=torch.uint8)
    moved = memory[3:].view_as(parts["codes"])
    moved.copy_(parts["codes"])
    wanted = one_by_one(bits, parts, shape)
    check(Grouped(bits), {**parts, "codes": moved}, shape, wanted, "eager")


@pytest.mark.parametrize("bits", BITS)
def test_packing_loses_nothing(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (40, GROUP), dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (40, 8 * bits)
    assert torch.equal(unpack_codes(packed, bits), codes)
    places = [[code_of(bits, group, index) for index in range(GROUP)] for group in packed.tolist()]
    assert places == codes.tolist()


def test_a_weight_of_three_dimensions_is_so_many_rows() -> None:
    shape = (2, 3, 64)
    parts = make(4, (6, 64))
    Grouped(4).check({name: Grouped(4).parts(shape)[name] for name in parts}, shape)
    assert torch.equal(Grouped(4).reference(parts, shape).view(6, 64), one_by_one(4, parts, (6, 64)))


def test_its_rows_are_its_parts_rows() -> None:
    format, shape = Grouped(3), (9, 128)
    assert format.by_rows and not format.transposed
    parts = make(3, shape)
    some = {name: part[2:5] for name, part in parts.items()}
    assert torch.equal(format.reference(some, (3, 128)), format.reference(parts, shape)[2:5])


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^bits: must be one of \(2, 3, 4, 8\), not 5$"):
        Grouped(5)
    with pytest.raises(ArgumentError, match=r"^shape: 96 columns do not make whole groups of 64$"):
        Grouped(4).parts((2, 96))


def test_bits_of_a_weight() -> None:
    for bits in BITS:
        parts = Grouped(bits).parts((8, 640))
        stored = sum(math.prod(part.shape) * part.dtype.itemsize for part in parts.values())
        assert stored * 8 == 8 * 640 * (bits + 0.5)
