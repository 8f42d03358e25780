"""Checks shared by tests of quantized checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from offspec.checkpoint import open_checkpoint
from offspec.checkpoint.tensors import PackedInfo, TensorInfo, Weight, torch_dtype
from offspec.core.errors import CheckpointError, HeaderError, MissingTensorError
from offspec_kernels.dequant import dequantize
from tests.support.packers import PackedWeight


def tensor_of(info: TensorInfo) -> Tensor:
    with info.file.open("rb") as file:
        file.seek(info.offset)
        data = bytearray(file.read(info.nbytes))
    return torch.frombuffer(data, dtype=torch.uint8).view(torch_dtype(info.dtype)).view(info.shape)


def values_of(weight: Weight) -> Tensor:
    """Dequantize a weight to float32, or read it if it is not packed."""
    if isinstance(weight, TensorInfo):
        return tensor_of(weight)
    assert isinstance(weight, PackedInfo)
    parts = {name: tensor_of(part) for name, part in weight.parts}
    out = torch.full((int(torch.Size(weight.shape).numel()),), torch.nan)
    return dequantize(weight.format, parts, weight.shape, out, path="reference")


def change(folder: Path, name: str, make: Callable[[Tensor], Tensor | None]) -> Path:
    """Replace a tensor of the folder by the result of `make`, or remove it if that is None."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    made = make(tensors.pop(name))
    if made is not None:
        tensors[name] = made
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


Damage = Callable[[Tensor], Tensor | None]
DAMAGES: dict[str, Damage] = {
    "missing": lambda t: None,
    "gone": lambda t: None,  # with an error other than MissingTensorError
    "half": lambda t: t[: len(t) // 2].clone(),
    "narrow": lambda t: t[:, :-1].contiguous(),
    "flat": lambda t: t.flatten(),
    "twice": lambda t: t.view(-1).repeat(2),
    "long": lambda t: t.repeat(10**5),
    "retyped": lambda t: t.half() if t.dtype == torch.float32 else t.float(),
    "integers": lambda t: t.int(),
    "negative": lambda t: -t,
    "huge": lambda t: t * 2**40,
    "high": lambda t: t.index_fill(0, torch.tensor([5]), 2),
    "low": lambda t: t.index_fill(0, torch.tensor([5]), -1),
}


def damages(parts: dict[str, str]) -> list[Any]:
    """Parameters of tests of damaged parts: part, damage and error, from parts and names of DAMAGES."""
    return [
        pytest.param(
            *(part, DAMAGES[name], MissingTensorError if name == "missing" else HeaderError),
            id=f"{part} {name}",
        )
        for part, names in parts.items()
        for name in names.split()
    ]


def refused(folder: Path, error: type[CheckpointError]) -> str:
    """Return the one-line message of the error for a folder."""
    with pytest.raises(error) as caught:
        open_checkpoint(str(folder))
    message = str(caught.value)
    assert message == " ".join(message.split()) and type(caught.value) is error
    return message


def check(folder: Path, modules: dict[str, PackedWeight]) -> None:
    """Check that the folder holds exactly these modules' weights, with the right values."""
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.tensors.keys() == {f"{name}.weight" for name in modules}
    for name, module in modules.items():
        weight = checkpoint.tensors[f"{name}.weight"]
        assert weight.shape == tuple(module.values.shape)
        assert torch.equal(values_of(weight), module.values)
