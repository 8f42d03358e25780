"""A mixture of experts that says what a small model says: real bytes, and routing by real hidden states.

Each MLP is copied to E experts, of which a router (`bench/lib/routers.py`) chooses k for a row. The weights
of the chosen sum to one, so their weighted sum is what the MLP says. The intermediate neurons of each copy
have an order of their own: no two experts have the same bytes, and sums are taken in another order, which is
all that can differ. The tensors are Mixtral's. Widening by a factor comes first: see
`offspec/checkpoint/widening.py`.

Letters: E experts, k chosen, H hidden size, I intermediate size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.lib.cgroup import BenchError
from offspec.checkpoint.widening import WideTensor, wide_config, wide_files
from offspec.core.errors import UnsupportedModelError

if TYPE_CHECKING:
    import torch

    from offspec.checkpoint import Checkpoint
    from offspec.checkpoint.write import Entry

MODEL_TYPES = ("llama", "mistral")
_LAYER_FILE = re.compile(r"model-layer-(\d+)\.safetensors")
# By Mixtral's names, in the order in which an expert's matrices lie behind one another.
_MATRICES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@dataclass(frozen=True, slots=True)
class Mixture:
    """What is made of a dense model.

    Args:
        experts: E, of each layer.
        chosen: k, of a row.
        skew: Exponent of the Zipf law that the experts' shares follow; 0: all are chosen alike.
        factor: By which the model is widened first.
        seed: Of routers and of the order of neurons.
    """

    experts: int
    chosen: int
    skew: float = 0.0
    factor: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.chosen <= self.experts:
            raise BenchError(f"{self.chosen} of {self.experts} experts cannot be chosen: name 1 to all")
        if self.skew < 0:
            raise BenchError(f"the skew is 0 (none) or more, not {self.skew:g}")

    @property
    def name(self) -> str:
        skewed = f"-skew{self.skew:g}" if self.skew else ""
        return f"x{self.factor}-{self.experts}of{self.chosen}{skewed}"


@dataclass(frozen=True, slots=True)
class ExpertFile:
    """One file of the mixture: a layer, its experts in front, or with no experts what is no layer.

    Args:
        layer: Its number, -1 for what is none.
        dense: Tensors that are only widened.
        matrices: The MLP's, by `_MATRICES`' values.
    """

    mixture: Mixture
    layer: int
    dense: Sequence[WideTensor]
    matrices: dict[str, WideTensor]

    @property
    def expert_bytes(self) -> int:
        return sum(matrix.nbytes for matrix in self.matrices.values())

    @property
    def router_shape(self) -> tuple[int, int]:
        return (self.mixture.experts, self.matrices["gate_proj"].shape[1])

    def entries(self) -> list[Entry]:
        """(name, dtype, shape) of the tensors in their order on disk."""
        found = [
            (self._name(expert, short), self.matrices[name].source.dtype, self.matrices[name].shape)
            for expert in range(self.mixture.experts if self.matrices else 0)
            for short, name in _MATRICES.items()
        ]
        found += [(tensor.name, tensor.source.dtype, tensor.shape) for tensor in self.dense]
        if self.matrices:
            found.append((self._router, self.matrices["gate_proj"].source.dtype, self.router_shape))
        return found

    def pieces(self, router: torch.Tensor | None) -> Iterator[tuple[str, Any]]:
        """The tensors in that order, each with its elements, in one piece or more.

        router: [E, H] of the model before widening, float32; None where there are no experts.
        """
        if self.matrices:
            yield from self._experts()
        for tensor in self.dense:
            yield from ((tensor.name, piece) for piece in tensor.pieces())
        if router is not None:
            yield self._router, wide_router(router, self.mixture.factor, self.matrices["gate_proj"])

    def _experts(self) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        whole = {name: np.concatenate(list(matrix.pieces())) for name, matrix in self.matrices.items()}
        for expert in range(self.mixture.experts):
            order = np.random.default_rng((self.mixture.seed, self.layer, expert)).permutation(
                len(whole["gate_proj"])
            )
            for short, name in _MATRICES.items():
                matrix = whole[name]
                ordered = matrix[:, order] if name == "down_proj" else matrix[order]
                yield self._name(expert, short), np.ascontiguousarray(ordered)

    def _name(self, expert: int, short: str) -> str:
        return f"model.layers.{self.layer}.block_sparse_moe.experts.{expert}.{short}.weight"

    @property
    def _router(self) -> str:
        return f"model.layers.{self.layer}.block_sparse_moe.gate.weight"


def expert_files(checkpoint: Checkpoint, mixture: Mixture) -> dict[str, ExpertFile]:
    """The files of the mixture. Raises UnsupportedModelError where Mixtral's layout cannot hold it."""
    kind = checkpoint.config.get("model_type")
    if kind not in MODEL_TYPES:
        raise UnsupportedModelError(
            f"a {kind} model cannot be upcycled; {' and '.join(MODEL_TYPES)} models can"
        )
    found: dict[str, ExpertFile] = {}
    for file, tensors in wide_files(checkpoint, mixture.factor).items():
        if any(tensor.name.endswith(".bias") for tensor in tensors):
            raise UnsupportedModelError("a model with biases cannot be upcycled: Mixtral's layout has none")
        number = _LAYER_FILE.fullmatch(file)
        matrices = {tensor.name.split(".")[-2]: tensor for tensor in tensors if ".mlp." in tensor.name}
        dense = [tensor for tensor in tensors if ".mlp." not in tensor.name]
        found[file] = ExpertFile(mixture, int(number[1]) if number else -1, dense, matrices)
    return found


def wide_router(router: torch.Tensor, factor: int, like: WideTensor) -> torch.Tensor:
    """A router over hidden states that are repeated, in the type of the tensors beside it."""
    from offspec.checkpoint.tensors import torch_dtype

    return (router / factor).repeat(1, factor).to(torch_dtype(like.source.dtype))


def mixture_config(config: dict[str, Any], mixture: Mixture) -> dict[str, Any]:
    """The config of the mixture; sliding_window is written out, since Mixtral's default need not be it."""
    return {
        **wide_config(config, mixture.factor),
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": mixture.experts,
        "num_experts_per_tok": mixture.chosen,
        "sliding_window": config.get("sliding_window"),
    }
