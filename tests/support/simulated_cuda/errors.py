"""What goes wrong on a simulated device."""


class SimulatedCudaError(RuntimeError):
    """What CUDA refuses or fails at."""
