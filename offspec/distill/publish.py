"""The folder of a head, written whole or not at all."""

import json
import os
import shutil
from pathlib import Path

import torch

from offspec.checkpoint.folder import CONFIG
from offspec.checkpoint.write import SafetensorsWriter
from offspec.core.errors import CheckpointError, RequestError
from offspec.core.files import disk_full, partial_name, sync_folder, write_file
from offspec.distill.student import Published


def claim_out(out: Path) -> None:
    """See that a folder can be made there, before hours of work. Raises RequestError, CheckpointError."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RequestError(f"{out} is there already: name another folder with --out, or remove it")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        probe = partial_name(out)
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise CheckpointError(f"cannot write to {out.parent}: {error.strerror or error}") from error


def write_head(head: Published, out: Path) -> int:
    """Make the folder; returns the bytes of its tensors. Raises DiskFullError."""
    partial = partial_name(out)
    tensors = {name: _stored(tensor) for name, tensor in head.tensors.items()}
    kinds = {torch.bfloat16: "BF16", torch.int64: "I64", torch.bool: "BOOL"}
    try:
        with disk_full(out):
            partial.mkdir()
            entries = [(name, kinds[value.dtype], tuple(value.shape)) for name, value in tensors.items()]
            with SafetensorsWriter(partial / head.file, entries) as writer:
                for name, value in tensors.items():
                    writer.write(name, value)
            write_file(partial / CONFIG, (json.dumps(head.config, indent=2) + "\n").encode())
            sync_folder(partial)
            os.replace(partial, out)
            sync_folder(out.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return sum(value.nbytes for value in tensors.values())


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    value = tensor.detach().cpu().contiguous()
    return value.to(torch.bfloat16) if value.is_floating_point() else value
