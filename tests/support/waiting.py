"""Waiting for what other threads and processes do: until a condition holds, never for a fixed time."""

import time
from collections.abc import Callable

PATIENCE = 60.0  # seconds until what does not come fails its test; what comes is not waited for so long


def wait_until(
    condition: Callable[[], object], what: str = "what was waited for", seconds: float = PATIENCE
) -> None:
    """Wait until this holds; fail where it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} does not come"
        time.sleep(0.005)
