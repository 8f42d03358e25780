"""Row counts of a pass at which the bits of a row depend on that row alone.

Matrix libraries choose their code by shape: a single row, or the last few of many, may be summed in a
different order than the rest. So a pass runs at row counts that are multiples of a step, padded with copies
of its last row. The step is found by testing products of the model's own shapes, in its dtype, with the
current number of threads. That takes milliseconds per shape.

Letters: N rows of a weight, K columns of it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

from offspec_kernels.row_linear import blocks

STEPS = (1, 2, 4, 8, 16, 32, 64)
_MANY = 320  # rows of the reference product
_TIMES = (1, 2, 3, 5)  # multiples of a step that are tested
_ALSO = (24, 36, 70, 128)  # also tested if they are multiples of the step
_MOST_VALUES = 1 << 21  # of a tested weight; a larger one is truncated to fewer rows
_LEAST_ROWS = 64  # of a tested weight, whatever its columns


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Multiples of `step` rows. `rows_independent`: whether rows proved independent at these counts."""

    step: int = 1
    rows_independent: bool = True

    def padded(self, rows: int) -> int:
        """Return the smallest allowed row count for `rows` rows."""
        return -(-rows // self.step) * self.step

    def common(self, other: "RowCounts") -> "RowCounts":
        """Return the row counts allowed by both; every step is a power of two."""
        return RowCounts(max(self.step, other.step), self.rows_independent and other.rows_independent)


@dataclass(frozen=True, slots=True, order=True)
class ProductShape:
    """Shape of a weight [N, K]. `transposed`: whether it is stored as [K, N]."""

    rows: int
    columns: int
    transposed: bool = False


def find_row_counts(
    shapes: Iterable[ProductShape], sums: Iterable[int], dtype: torch.dtype, device: torch.device
) -> RowCounts:
    """Find the smallest step that works for all these products and sums in this process.

    Args:
        shapes: Shapes of the weights.
        sums: Lengths of rows that are summed.
        dtype: Dtype of the weights and of the rows they are multiplied with; sums are float32.
        device: Compute device.
    """
    threads = torch.get_num_threads()
    step: int | None = STEPS[0]
    for size in sorted(set(sums)):
        step = step and _step_of_sums(size, step, device, threads)
    for shape in sorted({_shortened(shape) for shape in shapes}):
        step = step and _step_of(shape, step, dtype, device, threads)
    return RowCounts(rows_independent=False) if step is None else RowCounts(step)


def panels_agree(shapes: Iterable[ProductShape], dtype: torch.dtype) -> bool:
    """Return whether CPU products by panels give a row the bits of torch's own product, for these shapes."""
    threads, short = torch.get_num_threads(), {_shortened(shape) for shape in shapes}
    return (
        dtype == torch.bfloat16 and blocks.is_supported() and all(_agrees(shape, threads) for shape in short)
    )


@lru_cache(maxsize=256)
def _agrees(shape: ProductShape, threads: int) -> bool:
    if shape.columns % 2:
        return False
    weight, row = _cancelling(shape, torch.bfloat16, torch.device("cpu"))
    many = F.linear(row.expand(_MANY, -1).contiguous(), weight)
    return torch.equal(blocks.row_linear(row[None], weight)[0], many[0])


def _shortened(shape: ProductShape) -> ProductShape:
    rows = min(shape.rows, max(_MOST_VALUES // max(shape.columns, 1), _LEAST_ROWS))
    return ProductShape(rows, shape.columns, shape.transposed)


@lru_cache(maxsize=256)
def _step_of(
    shape: ProductShape, least: int, dtype: torch.dtype, device: torch.device, threads: int
) -> int | None:
    """Return the smallest step from `least` up at which a row has the same bits as among many rows."""
    weight, row = _cancelling(shape, dtype, device)
    others = torch.randn(_MANY, shape.columns, generator=_generator()).to(device, dtype)

    return _least_step(lambda rows: F.linear(rows[None], weight)[0], row, others, least)


@lru_cache(maxsize=16)
def _step_of_sums(size: int, least: int, device: torch.device, threads: int) -> int | None:
    """Return the smallest step from `least` up for sums over rows of `size` values, as in norms."""
    others = torch.randn(_MANY + 1, size, generator=_generator()).to(device)
    return _least_step(lambda rows: rows.mean(-1, keepdim=True), others[_MANY], others[:_MANY], least)


def _least_step(
    function: Callable[[torch.Tensor], torch.Tensor], row: torch.Tensor, others: torch.Tensor, least: int
) -> int | None:
    def bits(count: int) -> torch.Tensor:
        """Return the function's results for `row` at several places among `count` rows."""
        places = sorted({0, count // 3, count // 2, max(count - 2, 0), count - 1})
        rows = others[:count].clone()
        rows[places] = row
        return function(rows)[places]

    with torch.no_grad():
        many = bits(_MANY)
        if not bool((many == many[0]).all()):
            return None
        for step in STEPS:
            counts = {step * times for times in _TIMES} | {also for also in _ALSO if also % step == 0}
            if step >= least and all(bool((bits(count) == many[0]).all()) for count in sorted(counts)):
                return step
    return None


def _cancelling(
    shape: ProductShape, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight and a row whose terms cancel, so that only rounding errors remain in their product.

    A different order of summation then changes nearly every value, even if few bits of a sum are kept.
    """
    generator, half = _generator(), shape.columns // 2
    pair, order = (
        torch.randperm(half, generator=generator),
        torch.randperm(shape.columns, generator=generator),
    )
    rest = shape.columns - 2 * half
    values = torch.randn(shape.rows, half, generator=generator).to(dtype)
    weight = torch.cat([values, -values[:, pair], values.new_zeros(shape.rows, rest)], 1)[:, order]
    factors = torch.randn(half, generator=generator).to(dtype)
    row = torch.cat([factors, factors[pair], factors.new_zeros(rest)])[order]
    weight = weight.mT.contiguous().mT if shape.transposed else weight.contiguous()
    return weight.to(device), row.to(device)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
