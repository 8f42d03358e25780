"""Sizes of memory as people write them."""

import re

from offspec.core.errors import RequestError
from offspec.core.values import read_value

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_FEWEST_BYTES = 10**6  # a smaller number that is typed without a unit was meant in another one


def parse_bytes(text: str | int, name: str = "a memory size", least: int = 1) -> int:
    """Bytes, `least` or more, from `"1.5GB"`, `"800MiB"`, `"12G"` or a plain number.

    Raises RequestError, also for text without a unit that can hardly be meant in bytes.
    """
    wanted = "above 0" if least else "0 or above"
    if not isinstance(text, str):
        size: int = read_value(name, text, int, "a size such as 1.5GB, or a whole number of bytes")
        if size < least:
            raise RequestError(f"a memory size must be {wanted}, not {size}")
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if not match or (match[3] and not match[2]):
        raise RequestError(f"cannot read {text!r} as a memory size; write it like 1.5GB or 800MiB")
    units = _BINARY if match[3] else _UNITS
    size = int(float(match[1]) * units[match[2].upper()])
    if 0 < float(match[1]) < _FEWEST_BYTES and text.strip()[-1].isdigit():
        raise _without_unit(match[1])
    if size < least:
        raise RequestError(f"a memory size must be {wanted}, not {text!r}")
    return size


def _without_unit(number: str) -> RequestError:
    """The error for a number without a unit that is too small for a number of bytes."""
    meant = f"{number}GB" if float(number) < 1024 else f"{number}MB"
    return RequestError(f"a memory size of {number} means {number} bytes: write {meant}")
