"""A model rounded to 4 bits as offspec rounds drafts, written out as a checkpoint that anything can load.

    python -m bench.lib.quantised_draft MODEL [OUT]

The weights are those that offspec computes with when it drafts with MODEL in 4 bits (groups of 64,
calibrated), expanded to bfloat16 again, in one safetensors file with MODEL's own config and tokenizer. So
two programs that are compared can be given the very same draft.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bench.lib.cgroup import BenchError
from bench.lib.command import printed
from bench.lib.process import say
from offspec.checkpoint.widen import fingerprint
from offspec.checkpoint.widening import dense
from offspec.core.cache_dir import cache_root, make_folder

if TYPE_CHECKING:
    import torch

    from offspec.checkpoint import Checkpoint, TensorInfo
    from offspec.model.loaded import LoadedModel

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".gguf", ".bin", ".bin.index.json", ".pt", ".pth")


def ensure(model: str, out: Path | None = None) -> Path:
    """The folder of the rounded model, made if it is not there. By default it lies in the user's cache,
    under a name that changes with the model and with the code that rounds. Raises OffspecError."""
    from offspec.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(model, unpack=True)
    folder = out or default_folder(model, checkpoint)
    if folder.exists():
        return folder
    say(f"rounding {Path(model).name} to 4 bits")
    make_folder(folder, lambda partial: write(checkpoint, partial), lambda: say("another process makes it"))
    return folder


def default_folder(model: str, checkpoint: Checkpoint) -> Path:
    """Where a rounded model is kept when no folder is named."""
    from offspec.model.quantize import calibration
    from offspec.model.quantize import rounding as packing

    code = b"".join(Path(str(module.__file__)).read_bytes() for module in (calibration, packing))
    key = hashlib.sha256(fingerprint(checkpoint).encode() + code).hexdigest()[:12]
    return cache_root() / "rounded" / f"{Path(model).stem}-4bit-{key}"


def write(checkpoint: Checkpoint, folder: Path) -> None:
    """Round a model and write it into `folder`, which exists and is empty. Raises OffspecError."""
    import torch

    from offspec.model.loaded import LoadedModel
    from offspec.model.tokenizer import TextCodec, load_tokenizer
    from offspec.plan.load_drafts import calibration_ids

    codec = TextCodec(load_tokenizer(checkpoint.folder), checkpoint.folder, checkpoint.config)
    loaded = LoadedModel(checkpoint.folder, checkpoint.tensors, torch.bfloat16, torch.device("cpu"))
    try:
        ids = calibration_ids(codec, loaded.skeleton.context_length)
        loaded.load_rounded(4, True, len(ids) + 1, lambda done, total: None, ids)
        _write_weights(checkpoint, loaded, folder / "model.safetensors")
    finally:
        loaded.close()
    for file in sorted(checkpoint.folder.iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHTS):
            (folder / file.name).write_bytes(file.read_bytes())


def _write_weights(checkpoint: Checkpoint, loaded: LoadedModel, file: Path) -> None:
    """Every tensor of the checkpoint under its own name: as it is in the model, or as it is on disk."""
    from offspec.checkpoint.write import SafetensorsWriter

    parameters = dict(loaded.skeleton.model.named_parameters(remove_duplicate=False))
    stored = dense(checkpoint)
    found: dict[str, torch.Tensor | None] = {}
    for name, info in stored.items():
        held = parameters.get(name)
        if held is not None and held.device.type != "meta" and tuple(held.shape) == info.shape:
            found[name] = held.detach()
        elif name == loaded.skeleton.embedding:  # its rows are read one by one, so it is not in the model
            found[name] = None
        else:
            raise BenchError(f"tensor {name} has no parameter of its own name: this family cannot be rounded")
    entries = [(name, "BF16", stored[name].shape) for name in found]
    with SafetensorsWriter(file, entries) as out:
        for name, tensor in found.items():
            value = from_disk(stored[name]) if tensor is None else tensor
            out.write(name, value.bfloat16())


def from_disk(info: TensorInfo) -> torch.Tensor:
    """A tensor as it is stored, read into memory."""
    import torch

    from offspec.checkpoint.tensors import torch_dtype

    with info.file.open("rb") as file:
        file.seek(info.offset)
        data = bytearray(file.read(info.nbytes))
    return torch.frombuffer(data, dtype=torch_dtype(info.dtype)).view(info.shape)


def main(argv: list[str] | None = None) -> int:
    """Make the folder and print its name on stdout."""
    parser = argparse.ArgumentParser(prog="python -m bench.lib.quantised_draft", description=main.__doc__)
    parser.add_argument("model", help="a folder, a hub id, a .gguf file, or demo")
    parser.add_argument("out", nargs="?", type=Path, help="the folder to make (default: in the user's cache)")
    args = parser.parse_args(argv)
    return printed(lambda: ensure(args.model, args.out))


if __name__ == "__main__":
    sys.exit(main())
