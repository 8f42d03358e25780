"""Pairwise products of settings: any two values of two settings occur together in some row, in few rows."""

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any


def all_pairs(*settings: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return rows of a product in which any two values of different settings occur together at least once.

    The rows are chosen greedily, so they are the same each time; about 1.5 times as many as the product of
    the two longest settings.
    """
    rows = [*product(*(range(len(values)) for values in settings))]
    missing = {pair for row in rows for pair in _pairs(row)}
    chosen = list[tuple[Any, ...]]()
    while missing:
        best = max(rows, key=lambda row: len(missing.intersection(_pairs(row))))
        missing.difference_update(_pairs(best))
        chosen.append(tuple(values[index] for values, index in zip(settings, best, strict=True)))
    return chosen


def _pairs(row: Iterable[int]) -> list[tuple[Any, ...]]:
    return list(combinations(enumerate(row), 2))
