"""Products by rows: right on every path, and on triton's with the same bits however many rows there are."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from offspec_kernels.backend import Backend
from offspec_kernels.row_linear import blocks, grouped_linear, row_linear
from tests.support.kernel_device import device_of, kernel_device, needs_compiled_kernels
from tests.support.pairwise import all_pairs
from tests.support.poison import poisoned

PATHS: list[Backend] = ["eager", "triton"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
needs_blocks = pytest.mark.skipif(not blocks.is_supported(), reason="this processor has no product of blocks")


def _drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _with_gaps(values: Tensor) -> Tensor:
    """The same values, cut from rows with NaN to the right and below."""
    size = (len(values) + 3, values.shape[1] + 5)
    wide = torch.full(size, torch.nan, dtype=values.dtype, device=values.device)
    wide[: len(values), : values.shape[1]] = values
    return wide[: len(values), : values.shape[1]]


def _by_columns(weight: Tensor) -> Tensor:
    return weight.mT.contiguous().mT


@pytest.mark.parametrize(
    ("shape", "dtype", "path"), all_pairs([(1, 1, 1), (3, 5, 70), (65, 130, 33), (2, 64, 64)], DTYPES, PATHS)
)
def test_every_path_is_near_the_reference(shape: tuple[int, ...], dtype: torch.dtype, path: Backend) -> None:
    count, width, columns = shape
    rows, weight = _drawn(count, columns, dtype=dtype), _drawn(width, columns, dtype=dtype, seed=1)
    bias, place = _drawn(width, dtype=dtype, seed=2), device_of(path)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    there, moved = _with_gaps(rows.to(place)), weight.to(place)
    for shift, laid in ((None, moved), (bias, _with_gaps(moved)), (bias, _by_columns(moved))):
        expected = row_linear(rows, weight, shift, path="reference")
        with poisoned():
            got = row_linear(there, laid, None if shift is None else shift.to(place), path=path)
        torch.testing.assert_close(got.cpu(), expected, rtol=tolerance, atol=tolerance)


def _placed(row: Tensor, counts: Iterable[int]) -> Iterable[tuple[Tensor, int]]:
    """The row at any place beside rows of large values and of NaN, and where it is."""
    for count in counts:
        others = _drawn(count, len(row), dtype=row.dtype, seed=count).to(row.device)
        others[::3] *= 300
        others[1::5] = torch.nan
        for place in {0, count // 2, count - 1}:
            rows = others.clone()
            rows[place] = row
            yield rows, place


def _check_bits_of_a_row(weight: Tensor, counts: Iterable[int]) -> None:
    device = kernel_device()
    row, weight = _drawn(weight.shape[1], dtype=weight.dtype, seed=1).to(device), weight.to(device)
    with poisoned():
        alone = row_linear(row[None], weight, path="triton")[0]
        assert alone.isfinite().all()
        for rows, place in _placed(row, counts):
            assert torch.equal(row_linear(rows, weight, path="triton")[place], alone)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_of_a_row(dtype: torch.dtype) -> None:
    _check_bits_of_a_row(_drawn(70, 150, dtype=dtype), (2, 16, 65, 130))


@pytest.mark.gpu
@needs_compiled_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (64, 64), (576, 1536), (1536, 577), (4096, 4096), (129, 14336)])
def test_the_bits_of_a_row_on_a_gpu(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Sizes of real models, and sizes with which a tile ends early; weights by rows and by columns."""
    weight = _drawn(*shape, dtype=dtype) / shape[1] ** 0.5
    for laid in (weight, _by_columns(weight)):
        _check_bits_of_a_row(laid, (2, 15, 16, 17, 64, 65, 129, 1030))


@pytest.mark.gpu
@needs_compiled_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(17, 576, 1536), (130, 1536, 577), (5, 4096, 14336)])
def test_large_products_on_a_gpu(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """Compare with float64, in units of the sum of absolute products.

    Rounding K partial sums of random signs in float32 errs by some 2^-25 of that unit, whatever K is. TF32
    errs by 2^-12 / sqrt(K), 2^-17 for a million products and more: float32 is allowed 2^-20. Tensor cores cut
    partial sums off instead of rounding them, an error that grows with sqrt(K) / 16: 2^-17 is allowed. One
    rounding to the dtype of the result adds half a unit in the last place.
    """
    count, width, columns = shape
    rows, weight = _drawn(count, columns, dtype=dtype), _drawn(width, columns, dtype=dtype, seed=1)
    with poisoned():
        got = row_linear(rows.cuda(), weight.cuda(), path="triton").cpu().double()
    exact = rows.double() @ weight.double().T
    size = rows.double().abs() @ weight.double().abs().T
    rounding = torch.finfo(dtype).eps / 2 * exact.abs() if dtype != torch.float32 else 0.0
    allowed = 2.0**-20 if dtype == torch.float32 else 2.0**-17
    assert ((got - exact).abs() <= size * allowed + rounding * 1.01).all()


@pytest.mark.interpreted
@pytest.mark.parametrize(("count", "width"), [(1, 300), (150, 200)])
def test_programs_that_share_a_part_of_the_weight_follow_each_other(
    count: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU starts programs in the order of their numbers: the first ones read one part of the weight.

    It then comes from the cache for all rows but the first 64. In any other order the weight is read from
    memory again for every 64 rows.
    """
    from offspec_kernels.row_linear import triton

    rows, weight = _drawn(count, 100), _drawn(width, 100, seed=1)
    expected = row_linear(rows, weight, path="triton")
    kernel, grids = triton._row_linear, list[tuple[int, ...]]()

    class First:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            grids.append((*grid, 1, 1)[:3])
            return kernel[(-(-count // 64),)]

    monkeypatch.setattr(triton, "_row_linear", First())
    with poisoned():
        got = row_linear(rows, weight, path="triton")
    assert torch.equal(got[:, :64], expected[:, :64])
    assert got[:, 64:].isnan().all()
    assert len(grids) == 1 and grids[0][1:] == (1, 1), "an axis but the first has at most 65535 programs"


@needs_blocks
@pytest.mark.parametrize(
    ("columns", "width", "turned"), all_pairs([2, 64, 1056, 2050, 4096], [1, 70, 600], [False, True])
)
def test_the_bits_of_a_row_in_blocks(columns: int, width: int, turned: bool) -> None:
    """However the weight is cut or lies."""
    weight, row = _drawn(width, columns, dtype=torch.bfloat16), _drawn(columns, dtype=torch.bfloat16, seed=1)
    expected = row_linear(row[None], weight, path="reference")[0]
    with poisoned():
        alone = blocks.row_linear(row[None], weight)[0]
        torch.testing.assert_close(alone, expected, rtol=2e-2, atol=2e-2)
        weight = _by_columns(weight) if turned else weight
        for rows, place in _placed(row, (1, 3, 64, 65, 530)):
            assert torch.equal(blocks.row_linear(rows, weight)[place], alone)
            cut = [blocks.row_linear(rows, part)[place] for part in weight.split(33)]
            assert torch.equal(torch.cat(cut), alone)


@needs_blocks
@pytest.mark.parametrize(
    ("shape", "turned"),
    [
        ((48, 2050), True),
        ((272, 4096), False),
        ((2304, 576), False),
        ((2304, 576), True),
        ((80, 12288), True),
    ],
    ids=str,
)
def test_any_number_of_rows_in_blocks(shape: tuple[int, int], turned: bool) -> None:
    """Several panels, pieces and groups, shared among threads."""
    weight, rows = _drawn(*shape, dtype=torch.bfloat16), _drawn(1100, shape[1], dtype=torch.bfloat16, seed=1)
    many = blocks.row_linear(rows, weight)
    weight = _by_columns(weight) if turned else weight
    for start, end in ((0, 1100), (0, 1), (5, 7), (1, 66), (0, 512), (0, 513), (511, 1100)):
        assert torch.equal(blocks.row_linear(rows[start:end], weight), many[start:end])


def _grouped(counts: list[int], rows: int, unused: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Sources, targets and ends of groups with so many of the rows, and of entries that are of none."""
    entries, generator = sum(counts) + unused, torch.Generator().manual_seed(3)
    sources = torch.randint(rows, (entries,), generator=generator)
    return sources, torch.randperm(entries, generator=generator), torch.tensor(counts).cumsum(0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("dtype", "counts"),
    [
        (torch.float32, [0, 3, 0]),
        (torch.bfloat16, [70, 0, 64, 1, 2]),
        (torch.float16, [70, 0, 64, 1, 2]),
        (torch.bfloat16, [0, 0, 0, 130]),
    ],
    ids=str,
)
def test_groups_are_products_of_their_own(path: Backend, dtype: torch.dtype, counts: list[int]) -> None:
    """On the triton path with the bits that each row has by itself, wherever weights lie.

    Experts are run in groups where a GPU has all of them, and one by one where they are fetched.
    """
    groups, width, columns, place = len(counts), 70, 90, device_of(path)
    rows = _drawn(11, columns, dtype=dtype).to(place)
    weights = _drawn(groups, width, columns, dtype=dtype, seed=1).to(place)
    bias = _drawn(groups, width, dtype=dtype, seed=2).to(place)
    sources, targets, ends = (index.to(place) for index in _grouped(counts, len(rows), unused=4))
    for laid, shift in ((weights, None), (_by_columns(weights), bias)):
        expected = torch.zeros(len(sources), width, dtype=dtype, device=place)
        for group, (end, count) in enumerate(zip(ends.tolist(), counts, strict=True)):
            own = slice(end - count, end)
            own_bias = None if shift is None else shift[group]
            expected[targets[own]] = row_linear(rows[sources[own]], weights[group], own_bias, path=path)
        got = grouped_linear(_with_gaps(rows), laid, shift, sources, targets, ends, path=path)
        if path == "triton":
            assert torch.equal(got, expected)
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
