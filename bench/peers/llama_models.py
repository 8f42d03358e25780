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
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.lib.cgroup import BenchError
from bench.lib.command import printed, shared
from bench.lib.process import say
from bench.lib.report import read_prompts
from offspec.checkpoint.widen import read_recipe
from offspec.checkpoint.widening import dense
from offspec.core.cache_dir import cache_root, make_folder

if TYPE_CHECKING:
    from gguf import GGUFReader, GGUFWriter

    from offspec.checkpoint.tensors import TensorInfo

Values = np.ndarray[Any, Any]

KIND = "Q4_0"
FILE = "model.gguf"
_FILE_TYPE = 2  # llama.cpp's number for a file that is mostly Q4_0
_PIECE = 8 << 20  # values that are rounded at a time
_FAMILY = "llama"


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
    name = f"llama-{target.name}-{KIND}-{recipe['fingerprint']}"
    return kept_file(name, f"{target.name} in {KIND}", lambda out: write(target, source, out))


def kept_file(name: str, what: str, write: Callable[[Path], None]) -> Path:
    """The GGUF file in a folder of the cache of this name; `write` makes it where it is not there."""
    folder = cache_root() / "peers" / name
    if not folder.exists():
        say(f"writing {what} for llama.cpp")
        make_folder(folder, lambda partial: write(partial / FILE), lambda: say("another does"))
    return folder / FILE


def write(target: Path, source: Path, out: Path) -> None:
    """Write the checkpoint in the folder `target`, a llama that was widened from `source`."""
    from gguf import GGUFReader, GGUFWriter

    from offspec.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(str(target))
    writer = GGUFWriter(out, _FAMILY)
    describe(GGUFReader(source), sizes_of(checkpoint.config), writer)
    tensors = list(renamed(dense(checkpoint), checkpoint.config["num_hidden_layers"]))
    for name, info in tensors:
        _declare(writer, name, info)
    write_declared(writer, (_stored(name, info, checkpoint.config) for name, info in tensors))


def write_declared(writer: GGUFWriter, values: Iterable[Values]) -> None:
    """Write the file of a writer that knows all tensors: its description, then their values in order."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for each in values:
        writer.write_tensor_data(each)
    writer.close()


def sizes_of(config: Mapping[str, Any]) -> dict[str, int]:
    """What of a GGUF file's description differs in a widened model."""
    return {
        f"{_FAMILY}.embedding_length": config["hidden_size"],
        f"{_FAMILY}.feed_forward_length": config["intermediate_size"],
        f"{_FAMILY}.attention.head_count": config["num_attention_heads"],
        f"{_FAMILY}.attention.head_count_kv": config["num_key_value_heads"],
        "general.file_type": _FILE_TYPE,
    }


def describe(reader: GGUFReader, own: Mapping[str, int], writer: GGUFWriter) -> None:
    """Write the keys of another file of a llama, less those that the new file has values of its `own` for."""
    from gguf import GGUFValueType

    family = reader.fields["general.architecture"].contents()
    if family != _FAMILY:
        raise BenchError(f"only a {_FAMILY} model is written for llama.cpp, not a {family} model")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture" or key in own:  # the writer has the first
            continue
        inner = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(key, field.contents(), field.types[0], inner)
    for key, value in own.items():
        writer.add_key_value(key, value, GGUFValueType.UINT32)


def renamed(tensors: Mapping[str, TensorInfo], layers: int) -> Iterator[tuple[str, TensorInfo]]:
    """Tensors under the names that GGUF files of llamas have for them."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    names = get_tensor_name_map(MODEL_ARCH.LLAMA, layers)
    for name, info in tensors.items():
        known = names.get_name(name, try_suffixes=(".weight",))
        if known is None:
            raise BenchError(f"llama.cpp has no name for tensor {name}")
        yield known, info


def _declare(writer: GGUFWriter, name: str, info: TensorInfo) -> None:
    from gguf import GGMLQuantizationType, quant_shape_to_byte_shape

    if len(info.shape) == 1:
        writer.add_tensor_info(name, info.shape, np.dtype(np.float32), 4 * info.shape[0])
        return
    kind = GGMLQuantizationType[KIND]
    shape = quant_shape_to_byte_shape(info.shape, kind)
    writer.add_tensor_info(name, shape, np.dtype(np.uint8), int(np.prod(shape)), kind)


def _stored(name: str, info: TensorInfo, config: Mapping[str, Any]) -> Values:
    """A tensor as the file has it: a norm in float32, a matrix in blocks of KIND."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    if len(info.shape) == 1:
        return values(info, 0, info.shape[0])
    step = max(1, _PIECE // info.shape[1])
    if heads := heads_of(name, config):  # whole: its rows change places
        pieces = [rotated(values(info, 0, info.shape[0]), heads)]
    else:
        pieces = [values(info, start, start + step) for start in range(0, info.shape[0], step)]
    kind = GGMLQuantizationType[KIND]
    return np.concatenate([quantize(piece, kind) for piece in pieces])


def heads_of(name: str, config: Mapping[str, Any]) -> int:
    """Heads of a query or key weight, of which `rotated` puts the rows in order; 0 of other tensors."""
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name.split(".")[-2])
    return int(config[heads]) if heads else 0


def rotated(rows: Values, heads: int) -> Values:
    """Rows of a query or key weight as llama.cpp rotates them: those of the halves of a head by turns."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def values(info: TensorInfo, start: int, end: int) -> Values:
    """Rows of a bfloat16 or float32 tensor, in float32."""
    kind = {"BF16": "<u2", "F32": "<f4"}.get(info.dtype)
    if kind is None:
        raise BenchError(f"{info.name} is {info.dtype}; only BF16 and F32 are written for llama.cpp")
    stored = np.memmap(info.file, kind, "r", info.offset, shape=info.shape)[start:end]
    if info.dtype == "F32":
        return np.array(stored)
    wide = stored.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


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


def main(make: Callable[[Path, str], Path] = ensure) -> int:
    """Make the file; print its place, its layers' bytes, the draft and the prompts, as a line of JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("target", type=Path, help="folder of the model")
    shared(parser, "model", prompts=2)
    args = parser.parse_args()

    def made() -> str:
        target = make(args.target, args.model)
        found = {"target": str(target), "draft": str(source_file(args.model))}
        sizes = {"layer_bytes": layer_bytes(target)}
        return json.dumps({**found, **sizes, "texts": texts(args.target, args.prompts)})

    return printed(made)


if __name__ == "__main__":
    sys.exit(main())
