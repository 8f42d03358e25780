"""Curve as lines of text for the terminal, in braille dots or plain ASCII."""

import math
from collections.abc import Sequence

Point = tuple[float, float]

_NARROWEST = 12  # minimum columns of a curve
_BRAILLE = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bits of a cell's dots, by row and column


def plot(
    points: Sequence[Point],
    *,
    width: int,
    height: int = 8,
    mark: Point | None = None,
    x_label: str = "",
    y_label: str = "",
    ascii_only: bool = False,
) -> list[str]:
    """Plot y, from 0, against x, on a logarithmic scale, in lines of at most `width` characters.

    Returns no lines if there is not enough room.

    points: at least one; x above 0 and ascending, y at least 0. height: lines of the curve itself. mark: a
    point to highlight.
    """
    top, labels = _scale(max(y for _, y in [*points, *([mark] if mark else [])]), height)
    gutter = max(len(label) for label in labels)
    columns = width - gutter - 2
    if columns < _NARROWEST:
        return []
    across = _LogAxis(points, columns)
    cells = _curve(points, across, top, height, ascii_only)
    if mark:
        high = 1 if ascii_only else len(_DOTS)
        row = _dot(mark[1], top, height * high) // high
        cells[row][across.column(mark[0])] = "O" if ascii_only else "●"
    side, tick, corner = ("|", "+", "+") if ascii_only else ("│", "┤", "└")
    lines = [f"{'':>{gutter}} {y_label}".rstrip()] if y_label else []
    for label, row_cells in zip(labels, cells, strict=True):
        lines.append(f"{label:>{gutter}} {tick if label else side}{''.join(row_cells)}".rstrip())
    rule, names = across.axis(ascii_only)
    lines += [f"{'0':>{gutter}} {corner}{rule}", f"{'':>{gutter}}  {names}".rstrip()]
    if x_label:
        lines.append(f"{'':>{gutter}}  {x_label:^{columns}}".rstrip())
    return [line[:width] for line in lines]


class _LogAxis:
    """Logarithmic x axis over a number of columns."""

    def __init__(self, points: Sequence[Point], columns: int) -> None:
        self._xs = [x for x, _ in points]
        self.columns = columns

    def share(self, x: float) -> float:
        """Return the relative position: 0 at the first point, 1 at the last."""
        first, last = math.log(self._xs[0]), math.log(self._xs[-1])
        return min(max((math.log(x) - first) / (last - first), 0.0), 1.0) if last > first else 0.5

    def column(self, x: float) -> int:
        return round(self.share(x) * (self.columns - 1))

    def axis(self, ascii_only: bool) -> tuple[str, str]:
        """Return the line below the curve, and the numbers below it for as many points as fit."""
        line, tick = ("-", "+") if ascii_only else ("─", "┬")
        rule, names = [line] * self.columns, [" "] * self.columns
        for x in (self._xs[-1], *self._xs):  # the last has precedence
            text, column = f"{x:g}", self.column(x)
            start = min(max(column - len(text) // 2, 0), self.columns - len(text))
            if not "".join(names[max(start - 1, 0) : start + len(text) + 1]).strip():
                rule[column] = tick
                names[start : start + len(text)] = text
        return "".join(rule), "".join(names)


def _scale(most: float, height: int) -> tuple[float, list[str]]:
    """Return the y of the upper edge and a label, possibly empty, for each line from the top."""
    most = most or 1.0
    magnitude = 10 ** math.floor(math.log10(most))
    step = next(size * magnitude for size in (0.2, 0.5, 1.0, 2.0, 5.0) if most / (size * magnitude) <= 4)
    top = step * math.ceil(most / step - 1e-9)
    labels, places = [""] * height, max(-math.floor(math.log10(step) + 1e-9), 0)
    for count in range(1, round(top / step) + 1):
        labels[round((1 - count * step / top) * height)] = f"{count * step:,.{places}f}"
    return top, labels


def _curve(
    points: Sequence[Point], across: _LogAxis, top: float, height: int, ascii_only: bool
) -> list[list[str]]:
    """Return the cells of the curve, [height][columns]."""
    wide, high = (1, 1) if ascii_only else (len(_DOTS[0]), len(_DOTS))  # dots of a cell
    heights = _sampled(points, across, across.columns * wide)
    dots = [_dot(y, top, height * high) for y in heights]
    filled = [[0] * across.columns for _ in range(height)]
    for at, dot in enumerate(dots):
        before = dots[at - 1] if at else dot
        # A steep piece fills all dots between the heights of its neighbours, so that the line has no gaps.
        start, end = (dot, before) if dot < before else (min(before + 1, dot), dot + 1)
        for y in range(start, max(end, start + 1)):
            filled[y // high][at // wide] |= _DOTS[y % high][at % wide]
    return [[_cell(bits, ascii_only) for bits in row] for row in filled]


def _dot(y: float, top: float, count: int) -> int:
    """Return the nearest of `count` dots, counted from the top; the lowest stands for 0."""
    return min(round((1 - y / top) * count), count - 1)


def _cell(bits: int, ascii_only: bool) -> str:
    if not bits:
        return " "
    return "*" if ascii_only else chr(_BRAILLE + bits)


def _sampled(points: Sequence[Point], across: _LogAxis, count: int) -> list[float]:
    """Interpolate y linearly at `count` evenly spaced positions."""
    places = [across.share(x) for x, _ in points]
    heights, piece = [], 0
    for index in range(count):
        at = index / max(count - 1, 1)
        while piece < len(points) - 2 and at > places[piece + 1]:
            piece += 1
        left, right = places[piece], places[min(piece + 1, len(points) - 1)]
        share = min(max((at - left) / (right - left), 0.0), 1.0) if right > left else 0.0
        below, above = points[piece][1], points[min(piece + 1, len(points) - 1)][1]
        heights.append(below + share * (above - below))
    return heights
