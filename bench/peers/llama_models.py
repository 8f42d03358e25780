"""Files of a widened model for llama.cpp: a 4-bit GGUF file, and prompts as text.

    python -m bench.peers.llama_models TARGET [--model demo] [--prompts 2]

The file is written from the widened checkpoint, with the metadata of the small model's own GGUF file and
adjusted sizes. Every matrix is Q4_0 (4.5 bits per weight), including embedding and head, as with
`llama-quantize --pure`; norms are float32. The file is kept in the user's cache. The draft is the small
model's own file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.lib.cgroup import BenchError
from bench.lib.command import printed, shared
from bench.lib.process import cached_folder
from bench.lib.report import read_prompts
from bench.lib.widen import read_recipe
from offspec.checkpoint.wide_tensors import dense_tensors
from offspec.core.cache_dir import cache_root

if TYPE_CHECKING:
    from gguf import GGUFReader, GGUFWriter

    from offspec.checkpoint.tensors import TensorInfo

Values = np.ndarray[Any, Any]

KIND = "Q4_0"
FILE = "model.gguf"
_FILE_TYPE = 2  # llama.cpp's number for a mostly Q4_0 file
_FAMILY = "llama"
_HEADS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}


def source_file(model: str) -> Path:
    """Return the small model's own GGUF file. Raises BenchError if it has none."""
    from offspec.checkpoint.open import embedded_model

    file = embedded_model() if model == "demo" else Path(model)
    if file.suffix != ".gguf" or not file.is_file():
        raise BenchError(f"llama.cpp needs the small model as a GGUF file, and {model} is not one: name one")
    return file


def ensure(target: Path, model: str) -> Path:
    """Return the widened model as a GGUF file, written on the first run (0.3 times the bytes of bfloat16).

    Raises BenchError, DiskFullError.
    """
    source, recipe = source_file(model), read_recipe(target)
    folder = cache_root() / "peers" / f"llama-{target.name}-{KIND}-{recipe['fingerprint']}"
    doing = f"writing {target.name} in {KIND} for llama.cpp"
    return cached_folder(folder, doing, lambda partial: write(target, source, partial / FILE)) / FILE


def write(target: Path, source: Path, out: Path) -> None:
    """Write the checkpoint in the folder `target`, a Llama widened from `source`."""
    from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFReader, GGUFWriter, get_tensor_name_map
    from gguf.quants import quantize

    from offspec.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(str(target))
    writer = GGUFWriter(out, _FAMILY, use_temp_file=True)
    _describe(GGUFReader(source), checkpoint.config, writer)
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, checkpoint.config["num_hidden_layers"])
    kind = GGMLQuantizationType[KIND]
    for name, info in dense_tensors(checkpoint).items():
        known = names.get_name(name, try_suffixes=(".weight",))
        if known is None:
            raise BenchError(f"llama.cpp has no name for tensor {name}")
        rows = _values(info)
        if heads := _HEADS.get(known.split(".")[-2]):
            rows = rotated(rows, checkpoint.config[heads])
        if rows.ndim == 1:
            writer.add_tensor(known, rows)
        else:
            writer.add_tensor(known, quantize(rows, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(reader: GGUFReader, config: Mapping[str, Any], writer: GGUFWriter) -> None:
    """Write the keys of the small model's file, with the sizes of the wide model."""
    from gguf import GGUFValueType

    family = reader.fields["general.architecture"].contents()
    if family != _FAMILY:
        raise BenchError(f"only a {_FAMILY} model can be written for llama.cpp, not a {family} model")
    own = {
        f"{_FAMILY}.embedding_length": config["hidden_size"],
        f"{_FAMILY}.feed_forward_length": config["intermediate_size"],
        f"{_FAMILY}.attention.head_count": config["num_attention_heads"],
        f"{_FAMILY}.attention.head_count_kv": config["num_key_value_heads"],
        "general.file_type": _FILE_TYPE,
    }
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture" or key in own:  # set by the writer
            continue
        inner = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(key, field.contents(), field.types[0], inner)
    for key, value in own.items():
        writer.add_key_value(key, value, GGUFValueType.UINT32)


def rotated(rows: Values, heads: int) -> Values:
    """Return rows of a query or key weight in llama.cpp's order: alternating between the halves of a head."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _values(info: TensorInfo) -> Values:
    """Return a bfloat16 or float32 tensor in float32."""
    kind = {"BF16": "<u2", "F32": "<f4"}.get(info.dtype)
    if kind is None:
        raise BenchError(f"{info.name} is {info.dtype}; only BF16 and F32 can be written for llama.cpp")
    stored = np.memmap(info.file, kind, "r", info.offset, shape=info.shape)
    return np.array(stored) if info.dtype == "F32" else (stored.astype(np.uint32) << 16).view(np.float32)


def layer_bytes(file: Path) -> int:
    """Return the stored bytes of all layers in a GGUF file."""
    from gguf import GGUFReader

    return sum(int(tensor.n_bytes) for tensor in GGUFReader(file).tensors if tensor.name.startswith("blk."))


def texts(target: Path, prompts: int) -> dict[str, str]:
    """Return the first prompts, formatted by the model's chat template, by their ids."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(target)
    return {
        prompt.id: tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.prompt}], tokenize=False, add_generation_prompt=True
        )
        for prompt in read_prompts(prompts)
    }


def main() -> int:
    """Create the file; print its path, its layers' bytes, the draft and the prompts as a line of JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("target", type=Path, help="folder of the model")
    shared(parser, "model", prompts=2)
    args = parser.parse_args()

    def made() -> str:
        target = ensure(args.target, args.model)
        found = {"target": str(target), "draft": str(source_file(args.model))}
        sizes = {"layer_bytes": layer_bytes(target)}
        return json.dumps({**found, **sizes, "texts": texts(args.target, args.prompts)})

    return printed(made)


if __name__ == "__main__":
    sys.exit(main())
