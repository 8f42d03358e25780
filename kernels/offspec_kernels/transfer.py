"""Small arrays to a device and small results back, several in one copy.

A copy takes about ten microseconds whatever its size, and a copy that blocks the host also drains the
device's queue. So the inputs of a step are uploaded together without blocking, and its results are downloaded
together.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]

_ALIGNED = 16  # bytes: kernels are compiled for pointers aligned to this


def upload(given: Sequence[Array | Sequence[Any]], device: torch.device) -> list[Tensor]:
    """Copy these arrays to a device in one non-blocking copy and return the tensors.

    On a CPU the tensors share the arrays' memory. On other devices they are parts of one buffer; the arrays
    may be changed as soon as this returns, since the driver has by then staged the unpinned memory.

    Args:
        given: Arrays of any shapes and dtypes, or lists of integers, which become int64.
        device: Destination.
    """
    arrays = [array if isinstance(array, np.ndarray) else np.array(array, np.int64) for array in given]
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts = np.cumsum([0, *(-(-array.nbytes // _ALIGNED) * _ALIGNED for array in arrays)]).tolist()
    packed = np.zeros(max(starts[-1], _ALIGNED), np.uint8)
    for array, start in zip(arrays, starts, strict=False):
        packed[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    whole = torch.from_numpy(packed).to(device, non_blocking=True)
    return [
        whole[start : start + array.nbytes].view(_dtype(array)).view(array.shape)
        for array, start in zip(arrays, starts, strict=False)
    ]


def download(*tensors: Tensor) -> list[Array]:
    """Copy contiguous tensors of one device to arrays, the widest dtypes first, in one copy."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [tensor.numpy() for tensor in tensors]
    packed = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in tensors]).cpu()
    parts = packed.split([tensor.nbytes for tensor in tensors])
    return [
        part.view(tensor.dtype).view(tensor.shape).numpy()
        for part, tensor in zip(parts, tensors, strict=True)
    ]


def _dtype(array: Array) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
