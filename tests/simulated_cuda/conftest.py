"""What tests of the simulated device share: the machine, which runs nothing before somebody waits."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.simulated_cuda import is_simulated


@pytest.fixture
def late() -> Iterator[Any]:
    """The machine under the policy "late"."""
    if not is_simulated():
        pytest.skip("these are tests of the simulated device")
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
