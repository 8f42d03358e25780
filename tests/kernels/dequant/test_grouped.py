"""offspec's own groups of 64, value for value as their layout says, on every path."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from offspec_kernels.backend import Backend
from offspec_kernels.dequant.grouped import BITS, GROUP, Grouped, pack_codes, unpack_codes
from tests.kernels.dequant.cases import PATHS, check, random_bytes, scales


def make(bits: int, shape: tuple[int, ...], seed: int = 0, odd: float = 0.0) -> dict[str, Tensor]:
    """Random bytes, with scales of which a share `odd` is unusual."""
    parts = Grouped(bits).parts(shape)
    return {
        "codes": random_bytes(seed, *parts["codes"].shape),
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


def one_by_one(bits: int, parts: dict[str, Tensor], shape: tuple[int, ...]) -> Tensor:
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
@settings(max_examples=6, deadline=None)
@given(
    shape=st.sampled_from([(0, 64), (1, 0), (1, 64), (5, 128), (2, 3, 64)]),
    seed=st.integers(0, 9),
    odd=st.sampled_from([0.0, 0.5]),
)
@example(shape=(7, 192), seed=0, odd=0.0)  # 21 groups: more than the loops take at once, and no multiple
def test_as_described(bits: int, path: Backend, shape: tuple[int, ...], seed: int, odd: float) -> None:
    parts = make(bits, shape, seed, odd)
    wanted = one_by_one(bits, parts, shape)
    check(Grouped(bits), parts, shape, wanted, path)
    if path == "eager":  # codes at any address
        memory = torch.zeros(parts["codes"].numel() + 3, dtype=torch.uint8)
        moved = memory[3:].view_as(parts["codes"]).copy_(parts["codes"])
        check(Grouped(bits), {**parts, "codes": moved}, shape, wanted, path)


@pytest.mark.parametrize("bits", BITS)
def test_packing_loses_nothing(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (40, GROUP), dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (40, 8 * bits)
    assert torch.equal(unpack_codes(packed, bits), codes)
    places = [[code_of(bits, group, index) for index in range(GROUP)] for group in packed.tolist()]
    assert places == codes.tolist()
