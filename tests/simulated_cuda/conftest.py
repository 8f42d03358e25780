"""Shared fixture of the simulated device tests."""

from tests.support.simulated_cuda.late import late as late
