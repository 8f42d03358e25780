"""Writing a checkpoint of random weights in a given shape, at the speed of the disk.

Streaming speed depends on bytes and shapes, not on the values. So one block of random numbers is repeated:
every matrix is a run of the same values, small enough that hidden states stay finite. There is one
safetensors file per layer, one for embedding, final norm and head, a config.json, and a tokenizer of
meaningless words.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.lib.cgroup import BenchError
from offspec.checkpoint.folder import write_index
from offspec.checkpoint.json_file import write_json
from offspec.checkpoint.safetensors_writer import Entry, SafetensorsWriter
from offspec.checkpoint.tensors import nbytes_of
from offspec.core.files import atomic_folder, require_space

Stored = tuple[Entry, Callable[[], Iterable[Any]]]  # a tensor's entry, and its bytes in pieces

RECIPE = "random.json"  # in the folder: the shape of the model
_BLOCK = 32 << 20  # bytes of the random block
_DEVIATION = 0.02


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama. Only layers contain repeated matrices; the vocabulary is separate."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    layers: int
    vocabulary: int
    context: int = 8192
    head_size: int | None = None

    def config(self) -> dict[str, Any]:
        """config.json."""
        return {
            "model_type": "llama",
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
        }

    def entries(self) -> list[Entry]:
        """Return (name, dtype, shape) of every tensor."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**self.config()))
        return [(name, "BF16", tuple(weight.shape)) for name, weight in model.named_parameters()]


SHAPES = {
    "70b": Shape(8192, 28672, 64, 8, layers=80, vocabulary=128256),
    "tiny": Shape(128, 384, 4, 2, layers=6, vocabulary=128, context=2048),
}


def layer_file(index: int) -> str:
    return f"model-layer-{index:03d}.safetensors"


def plan(shape: Shape) -> dict[str, list[Entry]]:
    """Return the tensors of every file."""
    files: dict[str, list[Entry]] = {layer_file(index): [] for index in range(shape.layers)}
    files["model-outer.safetensors"] = []
    for entry in shape.entries():
        layer = re.match(r"model\.layers\.(\d+)\.", entry[0])
        files[layer_file(int(layer[1])) if layer else "model-outer.safetensors"].append(entry)
    return files


def build(shape: Shape, out: Path) -> Path:
    """Write the model to the folder `out` atomically; an existing model of the same shape is reused.

    Raises BenchError if `out` holds something else, DiskFullError.
    """
    if out.exists():
        if _read_shape(out) != shape:
            raise BenchError(f"{out} holds another model: remove it, or name another folder")
        return out
    files = plan(shape)
    total = sum(nbytes_of(*entry[1:]) for entries in files.values() for entry in entries)
    block = random_block(min(_BLOCK, total))
    require_space(out, total + (64 << 20), "the random model")
    out.parent.mkdir(parents=True, exist_ok=True)
    stored = {file: [at_random(entry, block) for entry in entries] for file, entries in files.items()}
    with atomic_folder(out) as partial:
        write_files(partial, stored)
        write_json(partial / RECIPE, asdict(shape))
        write_rest(shape, partial)
    return out


def _read_shape(folder: Path) -> Shape | None:
    """Return the shape of a model written by this module; None for any other folder."""
    try:
        return Shape(**json.loads((folder / RECIPE).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def random_block(nbytes: int = _BLOCK) -> memoryview:
    """Return the bytes of random bfloat16 numbers."""
    import torch

    generator = torch.Generator().manual_seed(0)
    values = torch.randn(nbytes // 2, generator=generator).mul_(_DEVIATION).to(torch.bfloat16)
    block: Any = values.view(torch.uint8).numpy()
    return memoryview(block)


def at_random(entry: Entry, block: memoryview) -> Stored:
    """Return a tensor made of a block's numbers. Norms are ones, close to a trained model's."""
    if len(entry[2]) == 1:
        return entry, lambda: [b"\x80\x3f" * entry[2][0]]  # 1.0 in bfloat16, little endian
    return entry, lambda: repeated(block, nbytes_of(*entry[1:]))


def repeated(block: memoryview, nbytes: int) -> Iterator[memoryview]:
    """Yield `nbytes` bytes by repeating a block."""
    for start in range(0, nbytes, len(block)):
        yield block[: min(len(block), nbytes - start)]


def write_files(folder: Path, files: Mapping[str, Sequence[Stored]]) -> None:
    """Write the files of a checkpoint, each in its own thread, and their index."""

    def write(file: str) -> None:
        with SafetensorsWriter(folder / file, [entry for entry, _ in files[file]]) as writer:
            for entry, pieces in files[file]:
                for piece in pieces():
                    writer.write(entry[0], piece)

    with ThreadPoolExecutor(min(12, os.cpu_count() or 1)) as pool:
        list(pool.map(write, files))
    entries = {entry: file for file, stored in files.items() for entry, _ in stored}
    total = sum(nbytes_of(*entry[1:]) for entry in entries)
    write_index(folder, {entry[0]: file for entry, file in entries.items()}, total)


def write_rest(shape: Shape, folder: Path, **more: Any) -> None:
    """Write the configuration, extended by `more`, and a tokenizer of words."""
    write_json(folder / "config.json", {**shape.config(), **more})
    write_tokenizer(folder, min(shape.vocabulary, 1024))


def write_tokenizer(folder: Path, words: int) -> None:
    """Write a word-level tokenizer: token i is the word "w<i>"; 0 pads, 1 begins, 2 ends."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<eos>"]
    table = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(3, words))])}
    tokenizer = Tokenizer(models.WordLevel(table, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(folder)
