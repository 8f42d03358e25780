"""Weights of a wider model with the output of a small one: real text at the cost of a large model.

Every hidden unit is repeated k times. With x' = [x, x, …, x] (k copies):

    RMSNorm    the mean square of x' is that of x, so its weight is only repeated
    linear     W' is a k by k grid of W / k: each output sums k equal parts, and is repeated k times
    attention  whole blocks of the H query and G key-value heads are repeated, so query head c·H + h
               reads key-value head (c·H + h) // (H/G) = c·G + h // (H/G): its own copy's. head_dim, RoPE
               and the scale are unchanged
    embedding  each row is repeated; head: each row is repeated and divided by k, and no longer tied

Parameters grow k² times. If k is a power of two, the division only lowers exponents, so every weight is
exact in its own dtype. Outputs can differ only because sums are taken in another order.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offspec.checkpoint.folder import Checkpoint
from offspec.checkpoint.tensors import PackedInfo, TensorInfo
from offspec.core.errors import RequestError, UnsupportedModelError

if TYPE_CHECKING:
    import numpy as np

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
_PIECE = 8 << 20  # bytes widened at a time
_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_REPEATED = re.compile(
    r"(input_layernorm|post_attention_layernorm)\.weight|(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\.bias"
)
_GRID = re.compile(r"(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\.weight")
_KEPT = re.compile(r"self_attn\.[qk]_norm\.weight")  # head_dim weights, shared by all heads


@dataclass(frozen=True, slots=True)
class WideTensor:
    """A tensor of the wide model: `source` with its rows (outputs) and columns (inputs) repeated.

    Args:
        name: Name in the wide model.
        source: Tensor of the small model.
        rows: Number of copies of the rows.
        columns: Number of copies of the columns.
        divisor: Divisor of all values.
    """

    name: str
    source: TensorInfo
    rows: int
    columns: int
    divisor: int

    @property
    def shape(self) -> tuple[int, ...]:
        if len(self.source.shape) == 1:
            return (self.source.shape[0] * self.rows,)
        return (self.source.shape[0] * self.rows, self.source.shape[1] * self.columns)

    @property
    def nbytes(self) -> int:
        return self.source.nbytes * self.rows * self.columns

    def pieces(self) -> Iterator[np.ndarray[Any, Any]]:
        """Yield blocks of rows of the wide tensor, in order, as raw elements."""
        import numpy as np

        kind = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}[self.source.dtype]
        small = np.memmap(self.source.file, kind, "r", self.source.offset, shape=self.source.shape)
        columns = self.columns if small.ndim == 2 else 1
        step = max(1, _PIECE // (small[0].nbytes * columns))
        for _ in range(self.rows):
            for start in range(0, len(small), step):
                part = divide(np.asarray(small[start : start + step]), self.divisor, self.name)
                yield np.tile(part, (1, columns)) if small.ndim == 2 else part


def divide(values: np.ndarray[Any, Any], divisor: int, name: str) -> np.ndarray[Any, Any]:
    """Return values / divisor; uint16 is bfloat16. Raises UnsupportedModelError unless it is exact."""
    import numpy as np

    if divisor == 1:
        return values
    brain = values.dtype == np.uint16
    wide = (values.astype(np.uint32) << 16).view(np.float32) if brain else values
    with np.errstate(invalid="ignore", under="ignore"):  # inexact values are detected below
        small = (wide / wide.dtype.type(divisor)).astype(wide.dtype)
    if brain:
        bits = small.view(np.uint32)
        exact = not np.any(bits & 0xFFFF) and np.array_equal(small * np.float32(divisor), wide)
        small = (bits >> 16).astype(np.uint16)
    else:
        exact = np.array_equal(small * small.dtype.type(divisor), wide)
    if not exact:
        raise UnsupportedModelError(
            f"{name} holds weights too small (or not finite) to be divided by {divisor} exactly: "
            "take a smaller factor, or a bfloat16 or float32 checkpoint"
        )
    return small


def dense_tensors(checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    """Return the tensors of an unquantized model by name. Raises UnsupportedModelError if it is quantized."""
    found: dict[str, TensorInfo] = {}
    for name, weight in checkpoint.tensors.items():
        if isinstance(weight, PackedInfo):
            raise UnsupportedModelError(
                f"{name} is quantized ({weight.format.name}): name a bfloat16 or float32 checkpoint"
            )
        found[name] = weight
    return found


def wide_files(checkpoint: Checkpoint, factor: int) -> dict[str, list[WideTensor]]:
    """Return the files of the wide model and the tensors in each: one file per layer, one for the rest.

    Raises UnsupportedModelError for an architecture or a tensor that cannot be widened.
    """
    if factor < 1 or factor & (factor - 1):
        raise RequestError(
            f"the factor must be a power of two (1, 2, 4, …), so that weights stay exact, not {factor}"
        )
    config = checkpoint.config
    if config.get("model_type") not in MODEL_TYPES or config.get("quantization_config"):
        raise UnsupportedModelError(
            f"a {config.get('model_type')} model cannot be widened; "
            f"these can, when not quantized: {', '.join(MODEL_TYPES)}"
        )
    tensors = dense_tensors(checkpoint)
    tied = config.get("tie_word_embeddings", _HEAD not in tensors)
    if tied or _HEAD not in tensors:
        tensors[_HEAD] = tensors[_EMBEDDING]
    files: dict[str, list[WideTensor]] = {}
    for name in sorted(tensors, key=_order):
        if name.endswith("rotary_emb.inv_freq"):  # some old checkpoints hold this constant
            continue
        layer = _LAYER.fullmatch(name)
        file = f"model-layer-{int(layer[1]):03d}.safetensors" if layer else "model-outer.safetensors"
        files.setdefault(file, []).append(_wide(name, tensors[name], factor))
    return files


def _order(name: str) -> tuple[int, str]:
    """Return a sort key: layers first, in the order of a pass; then the rest by name."""
    layer = _LAYER.fullmatch(name)
    return (int(layer[1]), layer[2]) if layer else (sys.maxsize, name)


def _wide(name: str, source: TensorInfo, factor: int) -> WideTensor:
    if source.dtype not in ("BF16", "F16", "F32"):
        raise UnsupportedModelError(f"{name} is {source.dtype}; only BF16, F16 and F32 can be widened")
    layer = _LAYER.fullmatch(name)
    part = layer[2] if layer else name
    if part == _EMBEDDING:
        return WideTensor(name, source, 1, factor, 1)
    if part == _HEAD:
        return WideTensor(name, source, 1, factor, factor)
    if part == "model.norm.weight" or (layer and _REPEATED.fullmatch(part)):
        return WideTensor(name, source, factor, 1, 1)
    if layer and _GRID.fullmatch(part):
        return WideTensor(name, source, factor, factor, factor)
    if layer and _KEPT.fullmatch(part):
        return WideTensor(name, source, 1, 1, 1)
    raise UnsupportedModelError(f"unknown tensor {name}: it cannot be widened")


def total_bytes(files: dict[str, list[WideTensor]]) -> int:
    """Return the total bytes of all tensors."""
    return sum(tensor.nbytes for tensors in files.values() for tensor in tensors)


def wide_config(config: dict[str, Any], factor: int) -> dict[str, Any]:
    """Return the config of the wide model. It sets head_dim, which no longer follows from the other sizes."""
    heads = config["num_attention_heads"]
    return {
        **config,
        "hidden_size": config["hidden_size"] * factor,
        "intermediate_size": config["intermediate_size"] * factor,
        "num_attention_heads": heads * factor,
        "num_key_value_heads": (config.get("num_key_value_heads") or heads) * factor,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "tie_word_embeddings": False,
    }
