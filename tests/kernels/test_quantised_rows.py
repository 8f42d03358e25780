"""Keys and values in 8 bits: what they are rounded to, and that attention reads just that."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offspec_kernels.backend import Backend
from offspec_kernels.errors import ArgumentError
from offspec_kernels.quantised_rows import QuantisedRows
from offspec_kernels.tree_attention import Chunk, TreeMask, reference, tree_attention
from tests.kernels.poison import poisoned
from tests.kernels.trees import Case, Shape, make_case
from tests.support.kernel_device import kernel_device, kernels_compile, needs_compiled_kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_row_is_rounded_by_itself(dtype: torch.dtype) -> None:
    """To the nearest of 255 numbers, in float64 and a row at a time."""
    rows = torch.randn(2, 40, 24, generator=torch.Generator().manual_seed(0))
    rows *= torch.logspace(-2, 2, 40)[:, None]
    rows[0, 3], rows[1, 5, 1:] = 0, 0
    rows = rows.to(dtype)
    found = QuantisedRows.of(rows)
    for head in range(2):
        for place, row in enumerate(rows[head].double()):
            scale = float(found.scales[head, place])
            assert scale == pytest.approx(float(row.abs().max()) / 127, rel=1e-6)
            error = (found.numbers[head, place].double() * scale - row).abs().max()
            assert float(error) <= scale * 0.5001
            alone = QuantisedRows.of(rows[head, place : place + 1])
            assert torch.equal(alone.numbers[0], found.numbers[head, place]) and alone.scales[0] == scale
    assert found.values().dtype == dtype and torch.equal(found[0, 3:9].values(), found.values()[0, 3:9])
    if dtype == torch.float32:  # what has been rounded is not rounded again
        assert torch.equal(QuantisedRows.of(found.values()).numbers, found.numbers)


def quantised(case: Case) -> tuple[QuantisedRows, QuantisedRows]:
    """Its keys and values in 8 bits; those that no query sees have scales that are no numbers."""
    return QuantisedRows.of(case.key), QuantisedRows.of(case.value)


def check(case: Case, path: Backend, **options: Any) -> None:
    """What float64 gives of their values; the bits that their values give, unless kernels are compiled.

    A compiled kernel spreads numbers of 8 bits over other threads than wider ones, so it adds up the products
    of a row in another order. Each of the two keeps the bits of a row: see `test_attention_rows`.
    """
    key, value = quantised(case)
    wide = key.values(), value.values()
    with poisoned():
        found = tree_attention(case.query, key, value, case.tree_mask, path=path, **options)
        same = tree_attention(case.query, *wide, case.tree_mask, path=path, **options)
        assert torch.equal(found, same) or (path == "triton" and kernels_compile())
    expected = torch.empty(found.shape, dtype=torch.float64, device=found.device)
    given_ = {name: options.get(name) for name in ("window", "softcap", "sinks")}
    scale = case.query.shape[3] ** -0.5
    reference.attend(case.query, *wide, case.tree_mask, scale, **given_, out=expected)
    error = (found.double() - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert float(error) < {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[case.query.dtype]


@settings(deadline=None, max_examples=15)
@given(
    prefix=st.sampled_from([0, 1, 64, 300, 2500]),
    causal=st.sampled_from([0, 5, 66]),
    tree=st.sampled_from([1, 17, 65]),
    dtype=st.sampled_from(DTYPES),
    window=st.sampled_from([None, 7, 100, Chunk(100)]),
    softcap=st.sampled_from([None, 5.0]),
    exact=st.booleans(),
    sizes=st.sampled_from([(16, 16), (24, 10), (80, 80)]),
    seed=st.integers(0, 100),
)
def test_on_a_cpu(
    prefix: int, causal: int, tree: int, dtype: torch.dtype, sizes: Any, seed: int, **options: Any
) -> None:
    shape = Shape(prefix, causal, tree, random.Random(seed).randint(1, causal + tree))
    check(make_case([shape, Shape(3, 0, 2, 2)], sizes=sizes, dtype=dtype, seed=seed), "eager", **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_long_branch_on_a_cpu(dtype: torch.dtype) -> None:
    """Blocks of a long prefix, and keys of a branch that are gathered."""
    case = make_case([Shape(4200, 30, 120, 140)], heads=(4, 1), sizes=(16, 16), dtype=dtype)
    sees = torch.ones(120, 120, dtype=torch.bool).tril()
    position = torch.arange(4200, 4350)
    mask = TreeMask.of(
        torch.cat([torch.zeros(20, 120, dtype=torch.bool), sees]), prefix=4200, causal=30, position=position
    )
    check(Case(case.query, case.key, case.value, mask), "eager")


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        (Shape(10, 3, 9, 12), torch.float32, {}),
        (Shape(330, 0, 5, 3), torch.bfloat16, {"softcap": 5.0}),
        (Shape(330, 2, 3, 2), torch.float16, {"window": 300, "sinks": torch.tensor([0.5, -1.0])}),
    ],
    ids=["near", "far", "window"],
)
def test_as_kernels(shape: Shape, dtype: torch.dtype, options: dict[str, Any]) -> None:
    place = kernel_device()
    there = {name: of.to(place) if isinstance(of, torch.Tensor) else of for name, of in options.items()}
    case = make_case([shape], heads=(2, 1), sizes=(16, 24), dtype=dtype, device=place)
    check(case, "triton", **there)


@pytest.mark.gpu
@needs_compiled_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 700}, {"softcap": 5.0}], ids=["all", "window", "softcap"])
def test_on_a_gpu(dtype: torch.dtype, options: dict[str, Any]) -> None:
    shapes = [Shape(2500, 30, 65, 80), Shape(64, 0, 17, 17)]
    check(make_case(shapes, heads=(8, 2), sizes=(128, 128), dtype=dtype, device="cuda"), "triton", **options)


def test_wrong_rows_are_named() -> None:
    case = make_case([Shape(3, 0, 2, 2)])
    key, value = quantised(case)
    for wrong, named in (
        (QuantisedRows(key.numbers, key.scales[..., :-1], torch.float32), "key.scales"),
        (QuantisedRows(key.numbers, key.scales.double(), torch.float32), "key.scales"),
        (QuantisedRows(key.numbers.float(), key.scales, torch.float32), "key.numbers"),
        (QuantisedRows(key.numbers, key.scales, torch.bfloat16), "key"),
    ):
        with pytest.raises(ArgumentError, match=named):
            tree_attention(case.query, wrong, value, case.tree_mask)
    with pytest.raises(ArgumentError, match="both"):
        tree_attention(case.query, case.key, value, case.tree_mask)
