"""Sizes, read and written."""

import pytest

from offspec import RequestError
from offspec.core.config import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1.5GB", 1_500_000_000),
        ("800MiB", 800 * 2**20),
        ("12g", 12 * 10**9),
        ("4096", 4096),
        (" 2 kb ", 2000),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1.5 parsecs", "0", "1e9", "5iB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(RequestError):
        parse_bytes(text)


def test_sizes_are_written() -> None:
    assert [format_bytes(n) for n in (0, 999, 1500, 2_500_000, 1_500_000_000, 3e12)] == [
        "0 B",
        "999 B",
        "2 KB",
        "2.50 MB",
        "1.50 GB",
        "3.00 TB",
    ]
