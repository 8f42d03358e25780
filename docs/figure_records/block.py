"""Figures of a block of a page, each with the value of its record.

A block is a row of a table, an item of a list or a paragraph, found by the text that it begins with.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from docs.figure_records.record import Record

# A figure of a record; several if the same figure is printed for each of them.
Value = float | tuple[float, ...]


@dataclass(frozen=True)
class Block:
    """Figures of a row, an item or a paragraph.

    Args:
        start: Text that it begins with; the page has one such block.
        record: Records of the figures, which must not say that answers changed.
        figures: Values by the figure as printed.
        at_most: Values by an upper bound as printed.
    """

    start: str
    record: Record | tuple[Record, ...]
    figures: Mapping[str, Value]
    at_most: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def records(self) -> tuple[Record, ...]:
        return self.record if isinstance(self.record, tuple) else (self.record,)


def in_order(
    start: str, record: Record | tuple[Record, ...], printed: str, values: tuple[float, ...]
) -> Block:
    """Block whose figures are printed in the order of the values."""
    return Block(start, record, dict(zip(printed.split(), values, strict=True)))
