"""Small arrays to a device and small results back: one copy for several of them.

A copy takes some ten microseconds whatever it holds, and one that the host waits for empties the device's
queue besides. So what a step needs goes there together and without a wait, and what it found comes back
together.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]

_ALIGNED = 16  # bytes: a kernel is compiled for pointers that are such multiples


def upload(given: Sequence[Array | Sequence[Any]], device: torch.device) -> list[Tensor]:
    """Tensors of these arrays on a device, by one copy that the host does not wait for.

    On a CPU they share the arrays' memory. Elsewhere they are parts of one buffer; the arrays may be changed
    as soon as this returns, since memory that is not pinned is staged by the driver before that.

    Args:
        given: Arrays of any shapes and dtypes, or lists of integers, which become int64.
        device: Where to.
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
    """Arrays of these contiguous tensors of one device, the widest numbers first, by one copy."""
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
