"""The curve in the terminal: its position, its labels, and its width."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offspec.ui.cli.plot import plot

RISING = [(16.0, 1.0), (64.0, 2.0), (256.0, 3.0), (1024.0, 4.0)]


def dots(line: str) -> set[int]:
    """Columns of a line that contain points of the curve."""
    return {at for at, sign in enumerate(line) if "\u2800" < sign <= "\u28ff" or sign in "*●O"}


def test_curve_in_ascii() -> None:
    lines = plot(RISING, width=24, height=4, mark=(256, 3.0), x_label="x", y_label="y", ascii_only=True)
    assert lines == [
        "  y",
        "4 +                 ****",
        "3 +          ***O***",
        "2 +    ******",
        "1 +****",
        "0 ++------+-----+------+",
        "   16    64    256  1024",
        "             x",
    ]


def test_braille_curve_rises_with_the_points() -> None:
    lines = plot(RISING, width=60, height=8)[:8]
    columns = [dots(line) for line in lines]
    assert all(columns[:7]) and not columns[7]  # the lowest point is a quarter of the way up
    assert min(columns[0]) > max(columns[6])


def test_every_column_of_a_steep_curve_has_a_dot() -> None:
    lines = plot([(1, 0.0), (2, 100.0), (3, 0.0)], width=40, height=6)[:6]
    assert len(set().union(*map(dots, lines))) == max(max(dots(line)) for line in lines) - 5 + 1


def test_mark_is_on_the_curve() -> None:
    lines = plot(RISING, width=60, mark=(64, 2.0))
    row, column = next((row, line.index("●")) for row, line in enumerate(lines) if "●" in line)
    assert lines[-2][column] == "┬" and lines[row].index("●") == column
    assert dots(lines[row]) & {column - 1, column + 1} or dots(lines[row + 1]) & {column - 1}


def test_labels_show_first_and_last_value() -> None:
    crowded = [(float(x), 1.0) for x in range(100, 200)]
    assert plot(crowded, width=40)[-1].split()[0] == "100"
    assert plot(crowded, width=40)[-1].split()[-1] == "199"


@given(
    ys=st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=12),
    width=st.integers(0, 130),
    height=st.integers(4, 12),
    ascii_only=st.booleans(),
)
def test_curves_stay_within_the_frame(ys: list[float], width: int, height: int, ascii_only: bool) -> None:
    points = [(float(2**at), y) for at, y in enumerate(ys)]
    lines = plot(points, width=width, height=height, mark=points[-1], ascii_only=ascii_only)
    assert all(len(line) <= width for line in lines)
    if lines:
        assert len(lines) == height + 2
        assert "".join(lines).isascii() == ascii_only


@pytest.mark.parametrize("most", [0.0, 0.004, 0.0999, 0.1, 1.0, 9.99, 10.0, 87.0, 12345.0])
def test_scale_reaches_the_highest_point(most: float) -> None:
    lines = plot([(1, 0.0), (2, most)], width=40, height=8)
    top = next(float(line.split()[0].replace(",", "")) for line in lines if line.split()[0][0].isdigit())
    assert most <= top <= max(2 * most, 1.0)
