"""What llama.cpp needs of a widened model: a GGUF file in 4 bits, and prompts as text.

    python -m bench.peers.llama_models TARGET [--model demo] [--prompts 2]

The file is written from the widened checkpoint, its description taken from the small model's own GGUF file
with the sizes changed. Every matrix is Q4_0 (4.5 bits a weight), embedding and head among them, as
`llama-quantize --pure` would have it; norms are float32. It is kept in the user's cache. The draft is the
small model's own file.
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
from bench.lib.process import kept
from bench.lib.report import read_prompts
from bench.lib.widen import read_recipe
from offspec.checkpoint.widening import dense
from offspec.core.cache_dir import cache_root

if TYPE_CHECKING:
    from gguf import GGUFReader, GGUFWriter

    from offspec.checkpoint.tensors import TensorInfo

Values = np.ndarray[Any, Any]

KIND = "Q4_0"
FILE = "model.gguf"
_FILE_TYPE = 2  # llama.cpp's number for a file that is mostly Q4_0
_FAMILY = "llama"
_HEADS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}


def source_file(model: str) -> Path:
    """The small model's own GGUF file. Raises BenchError where it has none."""
    from offspec.checkpoint.open import embedded_model

    file = embedded_model() if model == "demo" else Path(model)
    if file.suffix != ".gguf" or not file.is_file():
        raise BenchError(f"llama.cpp needs the small model as a GGUF file, and {model} is none: name one")
    return file


def ensure(target: Path, model: str) -> Path:
    """The widened model as a GGUF file, written on the first run (0.3 times the bytes of bfloat16).

    Raises BenchError, DiskFullError.
    """
    source, recipe = source_file(model), read_recipe(target)
    folder = cache_root() / "peers" / f"llama-{target.name}-{KIND}-{recipe['fingerprint']}"
    doing = f"writing {target.name} in {KIND} for llama.cpp"
    return kept(folder, doing, lambda partial: write(target, source, partial / FILE)) / FILE


def write(target: Path, source: Path, out: Path) -> None:
    """Write the checkpoint in the folder `target`, a llama that was widened from `source`."""
    from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFReader, GGUFWriter, get_tensor_name_map
    from gguf.quants import quantize

    from offspec.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(str(target))
    writer = GGUFWriter(out, _FAMILY, use_temp_file=True)
    _describe(GGUFReader(source), checkpoint.config, writer)
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, checkpoint.config["num_hidden_layers"])
    kind = GGMLQuantizationType[KIND]
    for name, info in dense(checkpoint).items():
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
    """Write the keys of the small model's file, with the sizes of the wide one."""
    from gguf import GGUFValueType

    family = reader.fields["general.architecture"].contents()
    if family != _FAMILY:
        raise BenchError(f"only a {_FAMILY} model is written for llama.cpp, not a {family} model")
    own = {
        f"{_FAMILY}.embedding_length": config["hidden_size"],
        f"{_FAMILY}.feed_forward_length": config["intermediate_size"],
        f"{_FAMILY}.attention.head_count": config["num_attention_heads"],
        f"{_FAMILY}.attention.head_count_kv": config["num_key_value_heads"],
        "general.file_type": _FILE_TYPE,
    }
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture" or key in own:  # the writer has the first
            continue
        inner = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(key, field.contents(), field.types[0], inner)
    for key, value in own.items():
        writer.add_key_value(key, value, GGUFValueType.UINT32)


def rotated(rows: Values, heads: int) -> Values:
    """Rows of a query or key weight as llama.cpp rotates them: those of the halves of a head by turns."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _values(info: TensorInfo) -> Values:
    """A bfloat16 or float32 tensor in float32."""
    kind = {"BF16": "<u2", "F32": "<f4"}.get(info.dtype)
    if kind is None:
        raise BenchError(f"{info.name} is {info.dtype}; only BF16 and F32 are written for llama.cpp")
    stored = np.memmap(info.file, kind, "r", info.offset, shape=info.shape)
    return np.array(stored) if info.dtype == "F32" else (stored.astype(np.uint32) << 16).view(np.float32)


def layer_bytes(file: Path) -> int:
    """Of all layers in a GGUF file, as they are stored."""
    from gguf import GGUFReader

    return sum(int(tensor.n_bytes) for tensor in GGUFReader(file).tensors if tensor.name.startswith("blk."))


def texts(target: Path, prompts: int) -> dict[str, str]:
    """The first prompts as the model is asked them, through its chat template, by their ids."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(target)
    return {
        prompt.id: tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.prompt}], tokenize=False, add_generation_prompt=True
        )
        for prompt in read_prompts(prompts)
    }


def main() -> int:
    """Make the file; print its place, its layers' bytes, the draft and the prompts, as a line of JSON."""
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
