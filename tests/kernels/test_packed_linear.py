"""Products with packed weights: to the last bit those of the values, at any number of rows."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from bench.kernels.dequant import FORMATS, random_parts
from offspec_kernels.dequant import dequantise
from offspec_kernels.errors import ArgumentError
from offspec_kernels.packed_linear import eager, packed_linear
from offspec_kernels.row_linear import blocks, row_linear
from tests.kernels.poison import poisoned

NAMES = ["int3-g64", "int4-g64", "nf4", "bnb-nf4-nested", "awq", "gptq-int3", "gptq-int4",
         "gptq-int4-act-order", "ct-int4", "ct-int4-zeros", "ct-fp8", "nvfp4", "Q4_0", "Q4_K", "Q6_K",
         "MXFP4"]  # fmt: skip
SHAPE = (160, 512)


@pytest.fixture(params=["blocks", "torch"])
def product(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Products in blocks, three panels of this weight, or torch's own, as on a processor without them."""
    if request.param == "torch":
        monkeypatch.setattr(blocks, "works", lambda: False)
    elif not blocks.works():
        pytest.skip("this processor has no product of blocks")
    monkeypatch.setattr(blocks, "_MOST", 64)
    yield request.param


def _rows(count: int) -> Tensor:
    return torch.randn(count, SHAPE[1], generator=torch.Generator().manual_seed(count)).bfloat16()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("product")
def test_the_product_with_its_values(name: str) -> None:
    format, bias = FORMATS[name], torch.randn(SHAPE[0]).bfloat16()
    parts = random_parts(format, SHAPE, torch.device("cpu"))
    values = dequantise(format, parts, SHAPE, torch.empty(SHAPE[0] * SHAPE[1], dtype=torch.bfloat16))
    for count in (1, 17, 130):
        for shift in (None, bias):
            expected = row_linear(_rows(count), values, shift)
            with poisoned():
                got = packed_linear(_rows(count), format, parts, SHAPE, shift)
            assert torch.isfinite(got).all()
            assert torch.equal(got, expected)


@pytest.mark.parametrize("name", ["nf4", "Q4_K", "ct-int4"])
def test_panels_are_what_is_multiplied(name: str) -> None:
    if not blocks.works():
        pytest.skip("this processor has no product of blocks")
    parts = random_parts(FORMATS[name], SHAPE, torch.device("cpu"))
    assert eager.can_cut(_rows(3), FORMATS[name], parts, SHAPE)
    assert not eager.can_cut(_rows(3).float(), FORMATS[name], parts, SHAPE)


@pytest.mark.parametrize("name", ["ct-fp8", "nf4", "Q6_K"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_some_rows(name: str, dtype: torch.dtype) -> None:
    format = FORMATS[name]
    parts = random_parts(format, SHAPE, torch.device("cpu"))
    values = dequantise(format, parts, SHAPE, torch.empty(SHAPE[0] * SHAPE[1], dtype=dtype))
    for start, end in ((0, 32), (64, 160), (0, 160)):
        found = format.some_rows(parts, SHAPE, start, end)
        assert found is not None
        out = torch.full(((end - start) * SHAPE[1],), torch.nan, dtype=dtype)
        assert torch.equal(dequantise(*found, (end - start, SHAPE[1]), out), values[start:end])


def test_the_bits_of_a_row() -> None:
    if not blocks.works():
        pytest.skip("this processor has no product of blocks")
    parts = random_parts(FORMATS["nf4"], SHAPE, torch.device("cpu"))
    rows = _rows(200)
    many = packed_linear(rows, FORMATS["nf4"], parts, SHAPE)
    for start, end in ((0, 1), (0, 2), (5, 22), (63, 65), (100, 200), (199, 200)):
        assert torch.equal(packed_linear(rows[start:end], FORMATS["nf4"], parts, SHAPE), many[start:end])


def test_arguments() -> None:
    parts = random_parts(FORMATS["nf4"], SHAPE, torch.device("cpu"))
    with pytest.raises(ArgumentError, match="rows"):
        packed_linear(_rows(3)[:, :64], FORMATS["nf4"], parts, SHAPE)
    del parts["codes"]
    with pytest.raises(ArgumentError, match="codes"):
        packed_linear(_rows(3), FORMATS["nf4"], parts, SHAPE)
