"""Write a model of random weights in a given shape, as a checkpoint on disk, as fast as the disk takes it.

    python -m bench.lib.random_model OUT --shape 70b --layers 28

A stream is bound by bytes and shapes, not by what the weights say. So one block of random numbers is written
over and over: every matrix is a run of the same values, small enough that hidden states stay finite. One
safetensors file for each layer, one for embedding, final norm and head, a config.json, and a tokenizer of
words that knows no language.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.lib.cgroup import BenchError
from bench.lib.command import printed
from offspec.checkpoint.write import Entry, SafetensorsWriter
from offspec.core.files import new_folder, require_space, write_file

RECIPE = "random.json"  # in the folder: the shape that it was made with
_BLOCK = 32 << 20  # values that are drawn; the rest repeats them
_DEVIATION = 0.02
_ITEM = 2  # bytes of a bfloat16


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model. Layers alone are repeated; the vocabulary is outside of them.

    family: as transformers calls it. more: what its configuration needs beside the sizes.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    layers: int
    vocabulary: int
    context: int = 8192
    head_size: int | None = None
    family: str = "llama"
    more: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        """config.json."""
        return {
            "model_type": self.family,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size or self.hidden // self.heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
            **self.more,
        }

    def entries(self) -> list[Entry]:
        """(name, dtype, shape) of every tensor."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        given = {name: value for name, value in self.config().items() if name != "model_type"}
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(self.family, **given))
        return [(name, "BF16", tuple(weight.shape)) for name, weight in model.named_parameters()]


SHAPES = {
    "70b": Shape(8192, 28672, 64, 8, layers=80, vocabulary=128256),
    "tiny": Shape(128, 384, 4, 2, layers=6, vocabulary=128, context=2048),
    "hybrid": Shape(
        2560, 9216, 16, 4, layers=20, vocabulary=32768, head_size=256,
        family="qwen3_5_text", more={"linear_num_value_heads": 32, "linear_num_key_heads": 16},
    ),
    "tiny-hybrid": Shape(
        128, 384, 4, 2, layers=8, vocabulary=128, context=2048, family="qwen3_5_text",
        more={
            "linear_num_value_heads": 4, "linear_num_key_heads": 2,
            "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        },
    ),
}  # fmt: skip


def tensor_bytes(entry: Entry) -> int:
    count = _ITEM
    for size in entry[2]:
        count *= size
    return count


def layer_file(index: int) -> str:
    return f"model-layer-{index:03d}.safetensors"


def plan(shape: Shape) -> dict[str, list[Entry]]:
    """The tensors of every file."""
    files: dict[str, list[Entry]] = {layer_file(index): [] for index in range(shape.layers)}
    files["model-outer.safetensors"] = []
    for entry in shape.entries():
        layer = re.match(r"model\.layers\.(\d+)\.", entry[0])
        files[layer_file(int(layer[1])) if layer else "model-outer.safetensors"].append(entry)
    return files


def build(shape: Shape, out: Path, *, on_write: Callable[[int], None] | None = None) -> Path:
    """Write the model into the folder `out`, which appears when it is whole; a like one there is used again.

    Raises BenchError where `out` holds something else, DiskFullError.
    """
    if out.exists():
        if read_shape(out) != shape:
            raise BenchError(f"{out} holds another model: remove it, or name another folder")
        return out
    files = plan(shape)
    total = sum(tensor_bytes(entry) for entries in files.values() for entry in entries)
    require_space(out, total + (64 << 20), "the random model")
    out.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(out) as partial:
        block = _random_block(min(_BLOCK, total))
        for file, entries in files.items():
            _write(partial / file, entries, block, on_write)
        _write_rest(shape, partial, files, total)
    return out


def read_shape(folder: Path) -> Shape | None:
    """The shape that a folder was made with, or None where it was not made here."""
    try:
        return Shape(**json.loads((folder / RECIPE).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _random_block(nbytes: int) -> memoryview:
    import torch

    generator = torch.Generator().manual_seed(0)
    values = torch.randn(-(-nbytes // _ITEM), generator=generator).mul_(_DEVIATION).to(torch.bfloat16)
    block: Any = values.view(torch.uint8).numpy()
    return memoryview(block)


def _write(
    file: Path, entries: list[Entry], block: memoryview, on_write: Callable[[int], None] | None
) -> None:
    with SafetensorsWriter(file, entries, on_write=on_write) as writer:
        for entry in entries:
            one_dimension = len(entry[2]) == 1  # norms: ones, as a trained model's nearly are
            for piece in _ones(entry) if one_dimension else _pieces(tensor_bytes(entry), block):
                writer.write(entry[0], piece)


def _ones(entry: Entry) -> Iterator[bytes]:
    yield b"\x80\x3f" * entry[2][0]  # 1.0 in bfloat16, little endian


def _pieces(nbytes: int, block: memoryview) -> Iterator[memoryview]:
    for start in range(0, nbytes, len(block)):
        yield block[: min(len(block), nbytes - start)]


def _write_rest(shape: Shape, folder: Path, files: dict[str, list[Entry]], total: int) -> None:
    index = {
        "metadata": {"total_size": total},
        "weight_map": {entry[0]: file for file, entries in files.items() for entry in entries},
    }
    for name, content in (
        ("model.safetensors.index.json", index),
        ("config.json", shape.config()),
        (RECIPE, asdict(shape)),
    ):
        write_file(folder / name, json.dumps(content, indent=2).encode() + b"\n")
    write_tokenizer(folder, min(shape.vocabulary, 1024))


def write_tokenizer(folder: Path, words: int) -> None:
    """Word-level: token i is the word "w<i>"; 0 pads, 1 begins, 2 ends."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<eos>"]
    table = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(3, words))])}
    tokenizer = Tokenizer(models.WordLevel(table, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(folder)


def main(argv: list[str] | None = None) -> int:
    """Build the model and print its folder on stdout."""
    parser = argparse.ArgumentParser(prog="python -m bench.lib.random_model", description=main.__doc__)
    parser.add_argument("out", type=Path, help="the folder to make")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="70b")
    parser.add_argument("--layers", type=int, help="how many layers (default: all of the shape)")
    args = parser.parse_args(argv)
    shape = SHAPES[args.shape]
    return printed(lambda: build(replace(shape, layers=args.layers or shape.layers), args.out))


if __name__ == "__main__":
    sys.exit(main())
