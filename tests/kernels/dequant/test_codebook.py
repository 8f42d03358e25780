"""NF4 and FP4, bit for bit as bitsandbytes makes values of them, on every path."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offspec_kernels.backend import Backend
from offspec_kernels.dequant.codebook import Codebook
from offspec_kernels.dequant.codebook.tables import BLOCKS, table_of
from tests.kernels.dequant.cases import DTYPES, PATHS, check, library, random_bytes, scales
from tests.support.pairwise import all_pairs

CPU = torch.device("cpu")


def rounded_by_bitsandbytes(
    shape: tuple[int, int], kind: Any, block: int, nested: bool, dtype: torch.dtype, size: float = 1.0
) -> tuple[Codebook, dict[str, Tensor], Tensor]:
    """The format, the parts as a checkpoint has them, and the values that bitsandbytes makes."""
    bnb = library("bitsandbytes.functional")
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(block)) * size
    codes, state = bnb.quantize_4bit(weight.to(dtype), None, None, block, nested, kind)
    parts = {"codes": codes, "absmax": state.absmax, "table": state.code}
    if nested:
        parts |= {"nested_absmax": state.state2.absmax, "nested_table": state.state2.code}
        format = Codebook(kind, block, torch.uint8, state.state2.blocksize, state.offset.item(), dtype)
    else:
        format = Codebook(kind, block, dtype=dtype)
    return format, parts, bnb.dequantize_4bit(codes, state)


@pytest.mark.parametrize(
    ("dtype", "path", "nested", "kind"), all_pairs(DTYPES, PATHS, [False, True], ["nf4", "fp4"])
)
def test_as_bitsandbytes(dtype: torch.dtype, path: Backend, nested: bool, kind: str) -> None:
    shape = (48, 448)  # 336 blocks: more than one nested block, more than a loop takes at once
    format, parts, wanted = rounded_by_bitsandbytes(shape, kind, 64, nested, dtype)
    assert wanted.dtype == dtype
    check(format, parts, shape, wanted.float(), path)


def test_tables_and_blocks_of_bitsandbytes() -> None:
    for kind in ("nf4", "fp4"):
        wanted = library("bitsandbytes.functional").get_4bit_type(kind, device="cpu")
        assert torch.equal(table_of(kind, CPU).view(torch.int32), wanted.view(torch.int32))
    shape = (1, 3170)  # one row: those of several, its loops for the CPU begin with a new block
    for block in (block for block in BLOCKS if block <= 1024):
        format, parts, wanted = rounded_by_bitsandbytes(shape, "nf4", block, True, torch.bfloat16, 1e-3)
        check(format, parts, shape, wanted.float(), "eager")


def make(format: Codebook, shape: tuple[int, int], seed: int, odd: float) -> dict[str, Tensor]:
    """Random codes, with sizes of which a share `odd` is unusual."""
    made = {}
    for name, part in format.parts(shape).items():
        if part.dtype == torch.uint8:
            made[name] = random_bytes(seed, *part.shape)
        else:
            made[name] = scales(seed, part.dtype, *part.shape, odd=odd if "absmax" in name else 0.0)
    return made


def one_by_one(format: Codebook, parts: dict[str, Tensor], shape: tuple[int, int]) -> Tensor:
    """In float32, of one weight after the other, by the formula."""
    codes, table = parts["codes"].view(-1).tolist(), parts["table"].numpy()
    values = np.empty(math.prod(shape), np.float32)
    with np.errstate(all="ignore"):
        for index in range(len(values)):
            block = index // format.block
            size = parts["absmax"].float().numpy()[block]
            if format.nested:
                size = parts["nested_table"].numpy()[parts["absmax"][block]]
                size = size * parts["nested_absmax"].numpy()[block // format.nested]
                size = size + np.float32(format.nested_offset)
            values[index] = table[codes[index // 2] >> (0 if index % 2 else 4) & 15] * size
    return torch.from_numpy(values).to(format.dtype or torch.float32).float().view(shape)


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=15, deadline=None)
@given(
    shape=st.sampled_from([(0, 64), (1, 2), (3, 62), (2, 64), (5, 96), (1, 4226)]),
    block=st.sampled_from(BLOCKS),
    absmax=st.sampled_from([torch.float32, torch.float16, torch.uint8]),
    dtype=st.sampled_from([None, *DTYPES]),
    seed=st.integers(0, 9),
    odd=st.sampled_from([0.0, 0.5]),
)
def test_as_the_formula_says(
    path: Backend,
    shape: tuple[int, int],
    block: int,
    absmax: torch.dtype,
    dtype: torch.dtype | None,
    seed: int,
    odd: float,
) -> None:
    nested = 4 if absmax == torch.uint8 else 0
    format = Codebook("nf4", block, absmax, nested, -0.3 if nested else 0.0, dtype)
    parts = make(format, shape, seed, odd)
    check(format, parts, shape, one_by_one(format, parts, shape), path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_without_a_table_it_is_the_standard_one(kind: Any, path: Backend) -> None:
    format, shape = Codebook(kind, 64, torch.float16), (4, 64)
    parts = make(format, shape, 0, 0.0)
    wanted = one_by_one(format, {**parts, "table": table_of(kind, CPU)}, shape)
    del parts["table"]
    check(format, parts, shape, wanted, path)
