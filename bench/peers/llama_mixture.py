"""An upcycled model as a GGUF file for llama.cpp: the same bits, the experts of a layer fused as it has them.

    python -m bench.peers.llama_mixture TARGET [--model demo] [--prompts 2]

Matrices keep the type of the checkpoint; norms and routers are float32. What is no weight is taken from the
small model's own GGUF file. The file is kept in the user's cache.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.lib.cgroup import BenchError
from bench.lib.upcycle import read_recipe
from bench.peers import llama_models
from bench.peers.llama_models import Values, describe, heads_of, renamed, rotated, sizes_of, source_file
from offspec.checkpoint.widening import dense

if TYPE_CHECKING:
    from gguf import GGUFWriter

    from offspec.checkpoint.tensors import TensorInfo

_EXPERT = re.compile(r"model\.layers\.(\d+)\.block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight")
_FUSED = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}
_FILE_TYPES = {"F32": 0, "BF16": 32}  # llama.cpp's numbers for files that are mostly of such a type


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of the file. parts: one, or one an expert. heads: of a query or key weight, whose rows change
    places; 0 for others."""

    name: str
    parts: list[TensorInfo]
    heads: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        own = self.parts[0].shape
        return (len(self.parts), *own) if "_exps" in self.name else own

    @property
    def kind(self) -> str:
        small = len(self.shape) == 1 or "ffn_gate_inp" in self.name
        return "F32" if small else self.parts[0].dtype

    def declare(self, writer: GGUFWriter) -> None:
        from gguf import GGMLQuantizationType

        item = {"F32": 4, "BF16": 2}[self.kind]
        as_bytes = (*self.shape[:-1], self.shape[-1] * item)
        kind = GGMLQuantizationType[self.kind]
        writer.add_tensor_info(self.name, as_bytes, np.dtype(np.uint8), int(np.prod(as_bytes)), kind)

    def data(self) -> Values:
        if self.kind == "F32" and self.parts[0].dtype != "F32":
            return llama_models.values(self.parts[0], 0, self.parts[0].shape[0])
        return np.concatenate([self._stored(part) for part in self.parts])

    def _stored(self, part: TensorInfo) -> Values:
        kind = "<f4" if part.dtype == "F32" else "<u2"
        found = np.memmap(part.file, kind, "r", part.offset, shape=part.shape)
        return rotated(found, self.heads) if self.heads else found


def ensure(target: Path, model: str) -> Path:
    """The upcycled model as a GGUF file, written on the first run. Raises BenchError, DiskFullError."""
    source, recipe = source_file(model), read_recipe(target)
    name = f"llama-{target.name}-{recipe['fingerprint']}"
    return llama_models.kept_file(name, target.name, lambda out: write(target, source, out))


def write(target: Path, source: Path, out: Path) -> None:
    """Write the upcycled checkpoint in the folder `target`, which was a llama whose GGUF file is `source`."""
    from gguf import GGUFReader, GGUFWriter

    from offspec.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(str(target))
    tensors = list(gguf_tensors(dense(checkpoint), checkpoint.config))
    kinds = {tensor.kind for tensor in tensors} | {"F32"}
    if not kinds <= _FILE_TYPES.keys():
        raise BenchError(f"{target.name} is not written for llama.cpp: only BF16 and F32 are")
    own = {**sizes_of(checkpoint.config), "general.file_type": max(_FILE_TYPES[kind] for kind in kinds)}
    own["llama.expert_count"] = checkpoint.config["num_local_experts"]
    own["llama.expert_used_count"] = checkpoint.config["num_experts_per_tok"]
    writer = GGUFWriter(out, "llama")
    describe(GGUFReader(source), own, writer)
    for tensor in tensors:
        tensor.declare(writer)
    llama_models.write_declared(writer, (tensor.data() for tensor in tensors))


def gguf_tensors(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> Iterator[GgufTensor]:
    """The tensors of the file: the experts of a layer as three, all others as they are."""
    fused: dict[str, dict[int, TensorInfo]] = {}
    rest: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        if expert := _EXPERT.fullmatch(name):
            layer, number, matrix = expert.groups()
            fused.setdefault(f"blk.{layer}.{_FUSED[matrix]}.weight", {})[int(number)] = info
        else:
            rest[name] = info
    for name, info in renamed(rest, config["num_hidden_layers"]):
        yield GgufTensor(name, [info], heads_of(name, config))
    for name, parts in fused.items():
        yield GgufTensor(name, [parts[number] for number in sorted(parts)])


if __name__ == "__main__":
    sys.exit(llama_models.main(ensure))
