"""A model rounded to 4 bits as offspec rounds drafts, written out as a checkpoint that anything can load.

    python -m bench.lib.quantised_draft MODEL

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
from bench.lib.process import kept
from offspec.checkpoint.widen import fingerprint
from offspec.checkpoint.widening import dense
from offspec.core.cache_dir import cache_root

if TYPE_CHECKING:
    import torch

    from offspec.checkpoint import Checkpoint, TensorInfo

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".gguf", ".bin", ".bin.index.json", ".pt", ".pth")


def ensure(model: str) -> Path:
    """The folder of the rounded model in the user's cache, made if it is not there, under a name that changes
    with the model and with the code that rounds. Raises OffspecError."""
    from offspec.checkpoint import open_checkpoint
    from offspec.model.quantize import calibration, rounding

    checkpoint = open_checkpoint(model, unpack=True)
    code = b"".join(Path(str(module.__file__)).read_bytes() for module in (calibration, rounding))
    key = hashlib.sha256(fingerprint(checkpoint).encode() + code).hexdigest()[:12]
    folder = cache_root() / "rounded" / f"{Path(model).stem}-4bit-{key}"
    return kept(folder, f"rounding {Path(model).name} to 4 bits", lambda partial: write(checkpoint, partial))


def write(checkpoint: Checkpoint, folder: Path) -> None:
    """Round a model and write it into `folder`, which exists and is empty. Raises OffspecError."""
    import torch

    from offspec.checkpoint.write import SafetensorsWriter
    from offspec.model.loaded import LoadedModel
    from offspec.model.tokenizer import TextCodec, load_tokenizer
    from offspec.plan.load_drafts import calibration_ids

    codec = TextCodec(load_tokenizer(checkpoint.folder), checkpoint.folder, checkpoint.config)
    loaded = LoadedModel(checkpoint.folder, checkpoint.tensors, torch.bfloat16, torch.device("cpu"))
    try:
        ids = calibration_ids(codec, loaded.skeleton.context_length)
        loaded.load_rounded(4, True, len(ids) + 1, lambda done, total: None, ids)
        parameters = dict(loaded.skeleton.model.named_parameters(remove_duplicate=False))
        stored = dense(checkpoint)
        entries = [(name, "BF16", info.shape) for name, info in stored.items()]
        with SafetensorsWriter(folder / "model.safetensors", entries) as out:
            for name, info in stored.items():
                held = parameters.get(name)
                if held is not None and held.device.type != "meta" and tuple(held.shape) == info.shape:
                    out.write(name, held.detach().bfloat16())
                elif name == loaded.skeleton.embedding:  # its rows are read one by one, from disk
                    out.write(name, _from_disk(info).bfloat16())
                else:
                    raise BenchError(f"tensor {name} has no parameter: this family is not written")
    finally:
        loaded.close()
    for file in sorted(checkpoint.folder.iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHTS):
            (folder / file.name).write_bytes(file.read_bytes())


def _from_disk(info: TensorInfo) -> torch.Tensor:
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
    args = parser.parse_args(argv)
    return printed(lambda: ensure(args.model))


if __name__ == "__main__":
    sys.exit(main())
