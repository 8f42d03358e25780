"""Device of tests of Triton kernels: interpreted on the CPU, or compiled on a GPU."""

import pytest
import torch
from torch import Tensor

from offspec_kernels.backend import Backend, is_interpreted

needs_compiled_kernels = pytest.mark.skipif(is_interpreted(), reason="in the interpreter this takes minutes")


def kernels_compile() -> bool:
    """Return whether this process compiles kernels for a GPU instead of interpreting them in Python."""
    return not is_interpreted()


def kernel_device() -> str:
    """Device type of tensors for kernels."""
    return "cuda" if kernels_compile() else "cpu"


def device_of(path: Backend) -> torch.device:
    """Device of the tensors for `path`: kernels may run on a GPU, the other paths run on the CPU."""
    return torch.device(kernel_device() if path == "triton" else "cpu")


def examples(interpreted: int, compiled: int) -> int:
    """Return the number of Hypothesis examples: fewer on a GPU, where each may compile a kernel first."""
    return compiled if kernels_compile() else interpreted


def moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device with its strides and the memory around it; `to` would close gaps."""
    if tensor.device == torch.device(device):
        return tensor
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return whole.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
