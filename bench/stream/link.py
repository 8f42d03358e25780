"""The link by itself: the rate at which files are read past the page cache, and pinned memory is copied."""

from __future__ import annotations

from offspec_planners import measure
from offspec_planners.measure import RawDisk

__all__ = ["RawDisk", "copy_bandwidth"]


def copy_bandwidth() -> float:
    """Bytes per second from pinned memory to the CUDA device: the best of several large copies."""
    return measure.copy_bandwidth().high
