"""Errors of a simulated device."""


class SimulatedCudaError(RuntimeError):
    """A call that CUDA would refuse, or that would fail."""
