"""Memory of an object's tensors."""

from collections.abc import Iterable, Mapping

import torch

from offspec.model.quantize.quantized_matrix import QuantizedMatrix
from offspec.model.unpacking import Scratch


def tensor_bytes(owner: object) -> int:
    """Bytes of the tensors that an object holds, directly, in a list or by name, without shared workspace."""
    if isinstance(owner, torch.Tensor):  # tensors in layouts of oneDNN have no nbytes
        return owner.numel() * owner.dtype.itemsize
    if isinstance(owner, QuantizedMatrix):
        owner = owner.parts
    if isinstance(owner, list):
        held: Iterable[object] = owner
    else:
        held = owner.values() if isinstance(owner, Mapping) else getattr(owner, "__dict__", {}).values()
    return sum(tensor_bytes(each) for each in held if not isinstance(each, Scratch))
