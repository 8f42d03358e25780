"""What formats have in common: rows by themselves, and weights that cannot be."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench.kernels.dequant import FORMATS, random_parts
from offspec_kernels.dequant import Format, Part, dequantize
from offspec_kernels.dequant.awq import Awq
from offspec_kernels.dequant.codebook import Codebook
from offspec_kernels.dequant.compressed import CompressedInt
from offspec_kernels.dequant.float4 import Mxfp4, Nvfp4
from offspec_kernels.dequant.float8 import Float8
from offspec_kernels.dequant.ggml import Ggml
from offspec_kernels.dequant.ggml.reordered import ReorderedGgml, StackedGgml
from offspec_kernels.dequant.gptq import Gptq
from offspec_kernels.dequant.grouped import Grouped
from offspec_kernels.errors import ArgumentError

WHOLE = {"awq", "gptq-int4", "gptq-int4-act-order", "ct-int4-zeros", "fp8-blocks"}
ALONE = {"int3-g64", "nf4", "bnb-int8", "ct-int4", "ct-int8", "ct-fp8", "nvfp4", "Q6_K"}


@pytest.mark.parametrize("name", sorted(WHOLE | ALONE))
def test_some_rows_are_those_of_the_whole(name: str) -> None:
    format, shape = FORMATS[name], (96, 256)
    parts = random_parts(format, shape, torch.device("cpu"))
    values = dequantize(format, parts, shape, torch.empty(96 * 256))
    for start, end in ((0, 32), (64, 96), (0, 96)):
        found = format.rows_of_parts(parts, shape, start, end)
        assert (found is None) == (name in WHOLE)
        if found is not None:
            out = torch.full(((end - start) * 256,), torch.nan)
            assert torch.equal(dequantize(*found, (end - start, 256), out), values[start:end])


def test_rows_that_share_a_scale_are_not_had_alone() -> None:
    assert not CompressedInt(8, False, 0, False).by_rows and CompressedInt(8, False, None, False).by_rows


def test_all_orders_of_a_type_are_unpacked_by_the_same_code() -> None:
    """So that it is compiled on the smallest of such weights."""
    rows = ReorderedGgml(("Q8_0",), (7,), ((0, 3, 4), (0, 0, 3)))
    assert rows.base_format == ReorderedGgml(("Q8_0",), (9,), ((0, 0, 9),), (3, 2, 16)).base_format
    assert rows.base_format != ReorderedGgml(("Q4_0",), (7,), ((0, 0, 7),)).base_format


IMPOSSIBLE: list[tuple[str, Callable[[], Any]]] = [
    ("bits", lambda: Grouped(5)),
    ("shape", lambda: Grouped(4).parts((2, 96))),
    ("group", lambda: Awq(0)),
    ("shape", lambda: Awq(32).parts((12, 64))),
    ("shape", lambda: Awq(32).parts((8, 60))),
    ("shape", lambda: Awq(32).parts((64,))),
    ("bits", lambda: Gptq(5, 32, False)),
    ("group", lambda: Gptq(4, 0, False)),
    ("scales", lambda: Gptq(4, 32, False, scales=torch.float64)),
    ("shape", lambda: Gptq(4, 48, False).parts((8, 64))),
    ("shape", lambda: Gptq(4, 32, False).parts((12, 64))),
    ("shape", lambda: Gptq(3, -1, False).parts((32, 40))),
    ("shape", lambda: Gptq(4, -1, False).parts((64,))),
    ("bits", lambda: CompressedInt(9, True, 32, False)),
    ("group", lambda: CompressedInt(4, True, -1, False)),
    ("act_order", lambda: CompressedInt(4, True, None, False, act_order=True)),
    ("scales", lambda: CompressedInt(4, True, 32, False, scales=torch.int8)),
    ("shape", lambda: CompressedInt(4, True, 48, False).parts((8, 64))),
    ("kind", lambda: Codebook("nf3")),
    ("block", lambda: Codebook(block=48)),
    ("absmax", lambda: Codebook(absmax=torch.uint8)),
    ("absmax", lambda: Codebook(absmax=torch.float32, nested=256)),
    ("nested", lambda: Codebook(absmax=torch.float32, nested=-1)),
    ("dtype", lambda: Codebook(dtype=torch.float64)),
    ("shape", lambda: Codebook().parts((3, 5))),
    ("shape", lambda: Mxfp4().parts((3, 40, 96))),
    ("shape", lambda: Mxfp4().parts((32,))),
    ("dtype", lambda: Nvfp4(dtype=torch.float64)),
    ("shape", lambda: Nvfp4().parts((4, 24))),
    ("shape", lambda: Nvfp4().parts((1, 4, 32))),
    ("per", lambda: Float8(None, "row")),
    ("block", lambda: Float8(None, "block")),
    ("block", lambda: Float8((8, 8), "tensor")),
    ("block", lambda: Float8((0, 8), "block")),
    ("shape", lambda: Float8((8, 88), "block").parts((3, 4, 264))),
    ("shape", lambda: Float8(None, "tensor").parts((3, 4, 264))),
    ("kind", lambda: Ggml("Q4_2")),
    ("heads", lambda: Ggml("Q4_0", heads=-1)),
    ("less_one", lambda: Ggml("Q4_0", less_one=True)),
    ("shape", lambda: Ggml("Q4_0").parts((1, 33))),
    ("shape", lambda: Ggml("F32").parts(())),
    ("shape", lambda: Ggml("Q8_0", heads=4).parts((12, 32))),
    ("shape", lambda: Ggml("Q8_0", heads=4).parts((32,))),
    ("shape", lambda: Ggml("F32", heads=4).parts((12,))),
    ("rows", lambda: ReorderedGgml(("Q8_0",), (7, 8), ((0, 0, 7),))),
    ("runs", lambda: ReorderedGgml(("Q8_0",), (7,), ((0, 0, 8),))),
    ("runs", lambda: ReorderedGgml(("Q8_0",), (7,), ((1, 0, 1),))),
    ("runs", lambda: ReorderedGgml(("Q8_0",), (7,), ((0, -1, 1),))),
    ("shape", lambda: ReorderedGgml(("Q8_0",), (7,), ((0, 0, 7),)).parts((8, 96))),
    ("shape", lambda: ReorderedGgml(("Q8_0",), (7,), ((0, 0, 7),), (2, 2, 2)).parts((7, 96))),
    ("rows", lambda: StackedGgml(("Q8_0",), (6, 6))),
    ("rows", lambda: StackedGgml(("Q8_0", "Q8_0"), (6, 4), True)),
    ("shape", lambda: StackedGgml(("Q8_0",), (6,)).parts((6, 64))),
    ("shape", lambda: StackedGgml(("Q8_0",), (6,)).parts((3, 8, 64))),
    ("shape", lambda: StackedGgml(("Q8_0",), (6,), turned=True).parts((3, 6, 64))),
    ("shape", lambda: StackedGgml(("Q8_0",), (6,)).parts((3, 6, 40))),
]


def test_what_cannot_be_is_refused() -> None:
    for place, (argument, make) in enumerate(IMPOSSIBLE):
        with pytest.raises(ArgumentError) as caught:
            pytest.fail(f"number {place}: {make()}")
        assert caught.value.argument == argument, place


@pytest.mark.parametrize(
    ("format", "shape", "name", "part"),
    [
        (Awq(16), (8, 64), "qzeros", Part(torch.int32, (2, 1))),
        (Gptq(4, 32, False), (8, 64), "g_idx", Part(torch.int32, (64,))),
        (Gptq(4, 32, False), (8, 64), "scales", Part(torch.float16, (4, 8))),
        (CompressedInt(4, True, 32, False), (8, 64), "scale", Part(torch.bfloat16, (8, 4))),
        (CompressedInt(4, True, 32, False), (8, 64), "zero_point", Part(torch.int32, (1, 2))),
        (Codebook(), (4, 64), "codes", Part(torch.uint8, (2, 64))),
        (Codebook(), (4, 64), "codes", Part(torch.uint8, (64, 2))),
        (Codebook(), (4, 64), "table", Part(torch.float32, (256,))),
        (Codebook(), (4, 64), "nested_absmax", Part(torch.float32, (1,))),
        (Mxfp4(), (3, 96, 40), "scales", Part(torch.uint8, (3, 40, 2))),
        (Float8((4, 132), "block"), (12, 264), "scale", Part(torch.float32, (3, 3))),
        (Float8((4, 132), "block"), (12, 264), "weight", Part(torch.float8_e5m2, (12, 264))),
        (Ggml("Q8_0"), (2, 32), "blocks", Part(torch.int8, (2, 34))),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "name", ""),
)
def test_a_wrong_part_is_named(format: Format, shape: tuple[int, ...], name: str, part: Part) -> None:
    parts = format.parts(shape)
    format.check(parts, shape)
    with pytest.raises(ArgumentError) as caught:
        format.check({**parts, name: part}, shape)
    assert caught.value.argument == name


def test_codes_may_be_a_column() -> None:
    """As bitsandbytes stores them."""
    parts = Codebook().parts((4, 64))
    Codebook().check({**parts, "codes": Part(torch.uint8, (128, 1))}, (4, 64))
