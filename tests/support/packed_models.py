"""Checkpoints with packed layers, made from small unquantized ones."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import load_file, save_file

from offspec.checkpoint import open_checkpoint
from offspec.checkpoint.folder import Checkpoint
from offspec.checkpoint.safetensors import read_header
from offspec.checkpoint.tensors import PackedInfo, TensorInfo, Weight
from offspec_kernels.dequant import Format, dequantize
from offspec_kernels.dequant.grouped import Grouped, pack_codes

Quantized = tuple[Format, dict[str, torch.Tensor]]


def to_grouped(bits: int) -> Callable[[torch.Tensor], Quantized]:
    """Return a function that rounds a matrix to even steps between the minimum and maximum of each group."""

    def quantize(weight: torch.Tensor) -> Quantized:
        groups = weight.float().view(-1, 64)
        low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
        step, offset = ((high - low) / (2**bits - 1)).half(), low.half()
        codes = ((groups - offset.float()) / step.float().clamp_min(1e-8)).round().clamp(0, 2**bits - 1)
        packed = pack_codes(codes.to(torch.uint8), bits)
        parts = {"codes": packed, "step": step, "offset": offset}
        return Grouped(bits), {name: part.reshape(len(weight), -1) for name, part in parts.items()}

    return quantize


def packed_checkpoint(
    source: Path, folder: Path, round_to: Callable[[torch.Tensor], Quantized], everything: bool = False
) -> tuple[Checkpoint, Path]:
    """Write a copy of a model with packed matrices, and a folder of their dequantized values in float32.

    everything: pack the embedding and the head too, not only the layers.
    """
    stored, dense, formats = dict[str, torch.Tensor](), dict[str, torch.Tensor](), dict[str, Quantized]()
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.dim() == 2 and tensor.shape[1] % 64 == 0 and (everything or ".layers." in name):
            formats[name] = round_to(tensor)
            stored |= {f"{name}.{part}": value for part, value in formats[name][1].items()}
            values = torch.full((tensor.numel(),), torch.nan)
            dense[name] = dequantize(*formats[name], tuple(tensor.shape), values).contiguous()
        else:
            stored[name] = dense[name] = tensor
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix == ".json":
            for place in (folder, folder / "dense"):
                place.mkdir(exist_ok=True)
                (place / file.name).write_bytes(file.read_bytes())
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(dense, folder / "dense" / "model.safetensors", metadata={"format": "pt"})
    found, _ = read_header(folder / "model.safetensors")
    checkpoint = open_checkpoint(str(folder / "dense"))
    tensors: Mapping[str, Weight] = {name: _weight(name, found, dense, formats) for name in dense}
    return Checkpoint("packed", folder, checkpoint.config, MappingProxyType(dict(tensors))), folder / "dense"


def _weight(
    name: str,
    found: Mapping[str, TensorInfo],
    dense: Mapping[str, torch.Tensor],
    formats: Mapping[str, Quantized],
) -> Weight:
    if name not in formats:
        return found[name]
    format_, parts = formats[name]
    places = tuple((part, found[f"{name}.{part}"]) for part in parts)
    return PackedInfo(name, tuple(dense[name].shape), format_, places)
