"""Products with packed weights: to the last bit those of the values, at any number of rows."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.kernels.dequant import FORMATS, random_parts
from offspec_kernels.dequant import Format, dequantize
from offspec_kernels.dequant.awq import Awq
from offspec_kernels.dequant.codebook import Codebook
from offspec_kernels.dequant.ggml import Ggml
from offspec_kernels.dequant.ggml import native as ggml
from offspec_kernels.dequant.ggml.reordered import ReorderedGgml
from offspec_kernels.dequant.gptq import Gptq
from offspec_kernels.dequant.grouped import native as grouped
from offspec_kernels.errors import ArgumentError
from offspec_kernels.packed_linear import packed_linear
from offspec_kernels.row_linear import blocks
from tests.support.exhaustive import sampled_params
from tests.support.poison import poisoned

FILLED = ["int2-g64", "int3-g64", "int4-g64", "int8-g64", "nf4", "bnb-fp4", "bnb-nf4-nested", "Q4_0", "Q4_1",
          "Q5_0", "Q8_0", "IQ4_NL", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS",
          "awq", "gptq-int2", "gptq-int4", "gptq-int8"]  # fmt: skip
UNPACKED = ["ct-int4", "ct-fp8", "nvfp4"]
WHOLE = ["ct-int4-zeros", "gptq-int3", "gptq-int4-act-order"]
USUAL = ["int3-g64", "int4-g64", "nf4", "Q4_0", "MXFP4", "Q4_K", "Q6_K", "awq", "nvfp4", "ct-int4-zeros"]
SHAPE = (160, 1280)  # several panels, and pieces of which the last is short
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(not blocks.is_supported(), reason="this processor has no product of blocks")


@pytest.fixture(params=["of all", "of panels"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Whether all products are made in blocks, as with a matrix unit, or only those of panels."""
    monkeypatch.setattr(blocks, "replaces_torch", lambda: request.param == "of all")
    monkeypatch.setattr(blocks, "_MOST", 64)
    yield request.param


def _rows(count: int, columns: int = SHAPE[1]) -> Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(count)).bfloat16()


def _values(format: Format, parts: dict[str, Tensor], shape: tuple[int, int] = SHAPE) -> Tensor:
    return dequantize(format, parts, shape, torch.empty(shape[0] * shape[1], dtype=torch.bfloat16))


def _check(format: Format, parts: dict[str, Tensor], shape: tuple[int, int] = SHAPE) -> None:
    got = packed_linear(_rows(3, shape[1]), format, parts, shape)
    wanted = blocks.row_linear(_rows(3, shape[1]), _values(format, parts, shape).contiguous())
    assert got is not None
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("name", sampled_params([*FILLED, *UNPACKED, *WHOLE], *USUAL))
def test_the_product_with_its_values(name: str, products: str) -> None:
    format, bias = FORMATS[name], torch.randn(SHAPE[0]).bfloat16()
    parts = random_parts(format, SHAPE, CPU)
    values = _values(format, parts)
    for count, shift in ((1, None), (17, bias), (130, None)):
        wanted = blocks.row_linear(_rows(count), values)
        with poisoned():
            got = packed_linear(_rows(count), format, parts, SHAPE, shift)
        if name in WHOLE or (name in UNPACKED and products == "of panels"):
            assert got is None
        else:
            assert got is not None and torch.isfinite(got).all()
            assert torch.equal(got, wanted if shift is None else wanted + shift)


@pytest.mark.parametrize(
    ("kind", "block", "halves"), [("nf4", 64, True), ("fp4", 256, False), ("nf4", 1024, False)]
)
def test_blocks_of_a_codebook(kind: str, block: int, halves: bool) -> None:
    """Of several sizes, with tables of their own, and rounded to float16 before."""
    format = Codebook(kind, block, dtype=torch.float16 if halves else None)
    parts = random_parts(format, (130, 3072), CPU)
    parts["absmax"][::7] *= 1e-6  # below the normal numbers of float16
    parts["table"] = torch.linspace(-1, 1, 16)
    _check(format, parts, (130, 3072))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("make", [Awq, partial(Gptq, 4, act_order=False), partial(Gptq, 2, act_order=False)])
def test_scales_of_other_dtypes(make: Callable[..., Format], dtype: torch.dtype) -> None:
    """With groups that end within a piece, and columns that are no whole panels."""
    format, shape = make(group=96, scales=dtype), (80, 1152)
    _check(format, random_parts(format, shape, CPU), shape)


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K"])
def test_rows_in_another_order(kind: str) -> None:
    """As GGUF files have those of queries and keys, and several of a hybrid's projections."""
    parts = random_parts(Ggml(kind), SHAPE, CPU)
    _check(Ggml(kind, heads=5), parts)
    _check(ReorderedGgml((kind,), (160,), ((0, 100, 60), (0, 0, 100))), {"blocks0": parts["blocks"]})


def test_scales_that_are_no_numbers() -> None:
    """Of all values, those of their group alone."""
    parts = random_parts(FORMATS["int4-g64"], SHAPE, CPU)
    parts["step"][3, 1], parts["step"][4, 0], parts["step"][5, 2] = torch.nan, torch.inf, -torch.inf
    _check(FORMATS["int4-g64"], parts)


def test_without_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a processor finds no values in registers, arithmetic makes the same."""
    for module, name in ((grouped, "int4-g64"), (ggml, "Q4_K"), (ggml, "MXFP4")):
        module._filling.cache_clear()
        monkeypatch.setattr(module, "has_lookups", lambda: False)
        _check(FORMATS[name], random_parts(FORMATS[name], SHAPE, CPU))
        module._filling.cache_clear()


@pytest.mark.parametrize("name", ["nf4", "awq", "Q5_K"])
def test_rows_as_callers_may_have_them(name: str) -> None:
    """None at all, with gaps, views that begin in the middle of a word, and any number with the same bits."""
    parts = random_parts(FORMATS[name], SHAPE, CPU)

    def product(rows: Tensor) -> Tensor:
        found = packed_linear(rows, FORMATS[name], parts, SHAPE)
        assert found is not None
        return found

    assert product(_rows(3)[:0]).shape == (0, SHAPE[0])
    memory = torch.zeros(4 * SHAPE[1] + 1, dtype=torch.bfloat16)
    for laid in (memory[1 : 3 * SHAPE[1] + 1].view(3, -1), torch.zeros(3, 2 * SHAPE[1]).bfloat16()[:, ::2]):
        assert torch.equal(product(laid.copy_(_rows(3))), product(_rows(3)))
    many = product(_rows(600))
    for start, end in ((0, 1), (5, 22), (63, 65), (0, 513), (599, 600)):
        assert torch.equal(product(_rows(600)[start:end]), many[start:end])


@pytest.mark.exhaustive
def test_another_process_compiles_nothing(tmp_path: Path) -> None:
    """What numba keeps of a loop is found again, whatever it closes over."""
    program = (
        "import torch; from bench.kernels.dequant import FORMATS, random_parts\n"
        "from offspec_kernels.packed_linear import packed_linear\n"
        "for name in ('awq', 'Q6_K'):\n"
        "    parts = random_parts(FORMATS[name], (64, 256), torch.device('cpu'))\n"
        "    packed_linear(torch.zeros(1, 256).bfloat16(), FORMATS[name], parts, (64, 256))\n"
    )
    kept = list[int]()
    for _ in range(2):
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        subprocess.run([sys.executable, "-c", program], env=environment, check=True)
        kept.append(len(list(tmp_path.rglob("*.nbc"))))
    assert kept[0] == kept[1] > 0


def test_arguments() -> None:
    parts = random_parts(FORMATS["nf4"], SHAPE, CPU)
    assert packed_linear(_rows(3).float(), FORMATS["nf4"], parts, SHAPE) is None
    with pytest.raises(ArgumentError, match="rows"):
        packed_linear(_rows(3)[:, :64], FORMATS["nf4"], parts, SHAPE)
    del parts["codes"]
    with pytest.raises(ArgumentError, match="codes"):
        packed_linear(_rows(3), FORMATS["nf4"], parts, SHAPE)
