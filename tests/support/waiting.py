"""Waiting for other threads and processes: until a condition holds, never for a fixed time."""

import time
from collections.abc import Callable

PATIENCE = 60.0  # seconds until a wait fails its test; successful waits take far less


def wait_until(
    condition: Callable[[], object], what: str = "what was waited for", seconds: float = PATIENCE
) -> None:
    """Wait until this holds; fail if it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} does not come"
        time.sleep(0.005)
