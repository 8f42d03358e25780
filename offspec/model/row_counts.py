"""Row counts of a pass at which the bits of a row depend on that row alone.

A library of products chooses its code by shape: a row by itself, or the last few of many, may be summed up in
another order than the rest. So a pass runs at row counts that are multiples of a step, with copies of its
last row behind it. The step is found by trying products of a model's own shapes, in its dtype, with the
threads there are: it takes milliseconds a shape.

Letters: N rows of a weight, K columns of it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

from offspec_kernels.row_linear import blocks

STEPS = (1, 2, 4, 8, 16, 32, 64)
_MANY = 320  # rows whose bits are the ones to have
_TIMES = (1, 2, 3, 5)  # a step is tried at so many of it
_ALSO = (24, 36, 70, 128)  # and at these, where they are multiples of it
_MOST_VALUES = 1 << 21  # of a weight that is tried; a larger one loses some of its rows
_LEAST_ROWS = 64  # of a weight, however long they are


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Multiples of `step` rows. holds: whether rows were found to be independent of each other at these."""

    step: int = 1
    holds: bool = True

    def padded(self, rows: int) -> int:
        """The least row count that will do for `rows` rows."""
        return -(-rows // self.step) * self.step

    def common(self, other: "RowCounts") -> "RowCounts":
        """Those that do where either does, since every step is a power of two."""
        return RowCounts(max(self.step, other.step), self.holds and other.holds)


@dataclass(frozen=True, slots=True, order=True)
class ProductShape:
    """A weight [N, K]. transposed: it lies in memory as [K, N]."""

    rows: int
    columns: int
    transposed: bool = False


def find_row_counts(
    shapes: Iterable[ProductShape], sums: Iterable[int], dtype: torch.dtype, device: torch.device
) -> RowCounts:
    """The smallest step that holds for all of these, as this process computes them.

    Args:
        shapes: Of weights.
        sums: Values of rows that are summed up.
        dtype: Of the weights, and of rows that are multiplied with them; sums are float32.
        device: Where they are.
    """
    threads = torch.get_num_threads()
    step: int | None = STEPS[0]
    for size in sorted(set(sums)):
        step = step and _step_of_sums(size, step, device, threads)
    for shape in sorted({_shortened(shape) for shape in shapes}):
        step = step and _step_of(shape, step, dtype, device, threads)
    return RowCounts(holds=False) if step is None else RowCounts(step)


def panels_agree(shapes: Iterable[ProductShape], dtype: torch.dtype) -> bool:
    """Whether panels of weights of these shapes, on a CPU, give a row the bits of torch's own product."""
    threads, short = torch.get_num_threads(), {_shortened(shape) for shape in shapes}
    return dtype == torch.bfloat16 and blocks.works() and all(_agrees(shape, threads) for shape in short)


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
    """The smallest step, from `least` up, at which a row has the bits it has among many, wherever it is."""
    weight, row = _cancelling(shape, dtype, device)
    others = torch.randn(_MANY, shape.columns, generator=_generator()).to(device, dtype)

    return _least_step(lambda rows: F.linear(rows[None], weight)[0], row, others, least)


@lru_cache(maxsize=16)
def _step_of_sums(size: int, least: int, device: torch.device, threads: int) -> int | None:
    """The same of sums over rows of `size` values, as norms have them."""
    others = torch.randn(_MANY + 1, size, generator=_generator()).to(device)
    return _least_step(lambda rows: rows.mean(-1, keepdim=True), others[_MANY], others[:_MANY], least)


def _least_step(
    function: Callable[[torch.Tensor], torch.Tensor], row: torch.Tensor, others: torch.Tensor, least: int
) -> int | None:
    def bits(count: int) -> torch.Tensor:
        """Those of the function of `row`, at some places among `count` rows."""
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
    """A weight and a row whose terms cancel: of their product nothing but the rounding is left.

    Any other order of summation shows in nearly every value then, even where few bits are kept of a sum.
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
