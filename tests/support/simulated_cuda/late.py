"""A simulated machine that runs tasks only when the host waits for them."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.simulated_cuda import is_simulated


@pytest.fixture
def late() -> Iterator[Any]:
    """The machine with the policy "late" and its counts at zero; skips the test on a real device."""
    if not is_simulated():
        pytest.skip("a real device runs on at once")
    from tests.support.simulated_cuda.machine import machine

    of = machine()
    of.settle()
    before, of.scheduler.policy = of.scheduler.policy, "late"
    of.reset_counts()
    try:
        yield of
    finally:
        of.settle()
        of.scheduler.policy, of.device = before, 0
