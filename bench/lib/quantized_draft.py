"""A model quantized to 4 bits like offspec's drafts, written as a checkpoint that any program can load.

    python -m bench.lib.quantized_draft MODEL

The weights equal those of offspec's 4-bit draft of MODEL (groups of 64, calibrated), dequantized to bfloat16,
in one safetensors file with MODEL's own config and tokenizer. So two programs can be compared with exactly
the same draft.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bench.lib.cgroup import BenchError
from bench.lib.command import printed
from bench.lib.process import cached_folder
from offspec.checkpoint.wide_model import fingerprint
from offspec.checkpoint.wide_tensors import dense_tensors
from offspec.core.cache_dir import cache_root

if TYPE_CHECKING:
    import torch

    from offspec.checkpoint import Checkpoint, TensorInfo

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".gguf", ".bin", ".bin.index.json", ".pt", ".pth")


def ensure(model: str) -> Path:
    """Return the folder of the quantized model in the user's cache, creating it if it is missing.

    Its name changes with the model and with the quantization code. Raises OffspecError.
    """
    from offspec.checkpoint import open_checkpoint
    from offspec.model.quantize import calibration, quantized_matrix

    checkpoint = open_checkpoint(model, unpack=True)
    code = b"".join(Path(str(module.__file__)).read_bytes() for module in (calibration, quantized_matrix))
    key = hashlib.sha256(fingerprint(checkpoint).encode() + code).hexdigest()[:12]
    folder = cache_root() / "rounded" / f"{Path(model).stem}-4bit-{key}"
    return cached_folder(
        folder, f"quantizing {Path(model).name} to 4 bits", lambda partial: write(checkpoint, partial)
    )


def write(checkpoint: Checkpoint, folder: Path) -> None:
    """Quantize a model and write it into `folder`, which exists and is empty. Raises OffspecError."""
    import torch

    from offspec.checkpoint.safetensors_writer import SafetensorsWriter
    from offspec.model.loaded import LoadedModel
    from offspec.model.tokenizer import TextCodec, load_tokenizer
    from offspec.plan.load_drafts import calibration_ids

    codec = TextCodec(load_tokenizer(checkpoint.folder), checkpoint.folder, checkpoint.config)
    loaded = LoadedModel(checkpoint.folder, checkpoint.tensors, torch.bfloat16, torch.device("cpu"))
    try:
        ids = calibration_ids(codec, loaded.skeleton.context_length)
        loaded.load_quantized(4, True, len(ids) + 1, lambda done, total: None, ids)
        parameters = dict(loaded.skeleton.model.named_parameters(remove_duplicate=False))
        stored = dense_tensors(checkpoint)
        entries = [(name, "BF16", info.shape) for name, info in stored.items()]
        with SafetensorsWriter(folder / "model.safetensors", entries) as out:
            for name, info in stored.items():
                held = parameters.get(name)
                if held is not None and held.device.type != "meta" and tuple(held.shape) == info.shape:
                    out.write(name, held.detach().bfloat16())
                elif name == loaded.skeleton.embedding:  # its rows are read individually from disk
                    out.write(name, _from_disk(info).bfloat16())
                else:
                    raise BenchError(f"tensor {name} has no parameter: this architecture is not supported")
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
    """Create the folder and print its path on stdout."""
    parser = argparse.ArgumentParser(prog="python -m bench.lib.quantized_draft", description=main.__doc__)
    parser.add_argument("model", help="a folder, a hub id, a .gguf file, or demo")
    args = parser.parse_args(argv)
    return printed(lambda: ensure(args.model))


if __name__ == "__main__":
    sys.exit(main())
