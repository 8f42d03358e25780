"""Row counts of a pass at which the bits of a row depend on that row alone.

A library of products chooses its code by shape: a row by itself, or the last few of many, may be summed up in
another order than the rest. So a pass runs at row counts that are multiples of a step, with copies of its
last row behind it. The step is found by trying products of a model's own shapes, in its dtype, with the
threads there are: it takes milliseconds a shape.

Letters: N rows of a weight, K columns of it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

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


@dataclass(frozen=True, slots=True, order=True)
class ProductShape:
    """A weight [N, K]. transposed: it lies in memory as [K, N]."""

    rows: int
    columns: int
    transposed: bool = False


def find_row_counts(shapes: Iterable[ProductShape], dtype: torch.dtype, device: torch.device) -> RowCounts:
    """The smallest step that holds for products of all these shapes, as this process computes them."""
    step = STEPS[0]
    for shape in sorted({_shortened(shape) for shape in shapes}):
        found = _step_of(shape, step, dtype, device, torch.get_num_threads())
        if found is None:
            return RowCounts(holds=False)
        step = found
    return RowCounts(step)


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

    def bits(count: int) -> torch.Tensor:
        """Those of `row`, [places, N], at places among `count` rows."""
        places = sorted({0, count // 3, count // 2, max(count - 2, 0), count - 1})
        rows = others[:count].clone()
        rows[places] = row
        return F.linear(rows[None], weight)[0, places]

    with torch.no_grad():
        many = bits(_MANY)
        if not bool((many == many[0]).all()):
            return None
        for step in STEPS:
            counts = sorted(
                {step * times for times in _TIMES} | {count for count in _ALSO if count % step == 0}
            )
            if step >= least and all(bool((bits(count) == many[0]).all()) for count in counts):
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
