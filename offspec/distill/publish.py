"""The folder of a head, written whole or not at all."""

import json
from pathlib import Path

import torch

from offspec.checkpoint.folder import CONFIG
from offspec.checkpoint.write import SafetensorsWriter
from offspec.core.errors import RequestError
from offspec.core.files import new_folder, probe, write_file, writing
from offspec.distill.student import Published


def claim_out(out: Path) -> None:
    """See that a folder can be made there, before hours of work. Raises RequestError, CheckpointError."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RequestError(f"{out} is there already: name another folder with `out`, or remove it")
    with writing(out.parent, "name another folder with `out`"):
        out.parent.mkdir(parents=True, exist_ok=True)
        probe(out)


def write_head(head: Published, out: Path) -> int:
    """Make the folder; returns the bytes of its tensors. Raises DiskFullError."""
    tensors = {name: _stored(tensor) for name, tensor in head.tensors.items()}
    kinds = {torch.bfloat16: "BF16", torch.int64: "I64", torch.bool: "BOOL"}
    entries = [(name, kinds[value.dtype], tuple(value.shape)) for name, value in tensors.items()]
    with new_folder(out) as partial:
        with SafetensorsWriter(partial / head.file, entries) as writer:
            for name, value in tensors.items():
                writer.write(name, value)
        write_file(partial / CONFIG, (json.dumps(head.config, indent=2) + "\n").encode())
    return sum(value.nbytes for value in tensors.values())


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    value = tensor.detach().cpu().contiguous()
    return value.to(torch.bfloat16) if value.is_floating_point() else value
