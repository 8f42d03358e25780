"""Weights of a plain decoder, fused and laid out for the few rows of a draft step.

Plain is the shape that most small models have: RMS norms, rotary attention with grouped queries, a gated
SiLU. A product of 16 rows is bound by how fast the weights arrive, and a matrix as it lies in a checkpoint
is rearranged on every call by oneDNN, which doubles that traffic; here it is rearranged once.

Letters: T rows, H hidden size, Q query heads, KV key heads, D head size, I inner size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from offspec.core.memory import trim
from offspec.model.skeleton import Skeleton

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_ROPES = ("default", "linear", "llama3", "yarn")  # fixed frequencies, whatever the length of the text
_ROWS_HINT = 16  # what oneDNN lays weights out for; other counts run as well with it

_MATRICES = tuple(f"self_attn.{x}_proj" for x in "qkvo") + tuple(
    f"mlp.{x}_proj" for x in ("gate", "up", "down")
)
_NEEDED = {f"{name}.weight" for name in (*_MATRICES, "input_layernorm", "post_attention_layernorm")}
_BIASES = {f"{name}.bias" for name in _MATRICES}
_HEAD_NORMS = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}


@dataclass(frozen=True, slots=True)
class PlainShape:
    """Sizes of a plain decoder. windows: one per layer, None where attention reaches all the way back."""

    heads: int
    kv_heads: int
    size: int
    eps: float
    windows: tuple[int | None, ...]

    @property
    def groups(self) -> int:
        return self.heads // self.kv_heads


def plain_shape(skeleton: Skeleton) -> PlainShape | None:
    """The sizes, or None for a model that has anything which the lean forward does not compute."""
    config, model, decoder = skeleton.config, skeleton.model, skeleton.decoder
    if config.model_type not in FAMILIES or config.hidden_act != "silu":
        return None
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = getattr(config, "rope_parameters", None) or {}
    frequencies = getattr(getattr(decoder, "rotary_emb", None), "inv_freq", None)
    if rope.get("rope_type", "default") not in _ROPES or frequencies is None or 2 * len(frequencies) != size:
        return None
    if {name for name, _ in decoder.named_children()} != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return None
    if {name for name, _ in model.named_children()} != {"model", "lm_head"}:
        return None
    if not all(_is_plain(layer, size) for layer in skeleton.layers):
        return None
    return PlainShape(heads, kv_heads, size, float(config.rms_norm_eps), _windows(config))


def _is_plain(layer: torch.nn.Module, size: int) -> bool:
    shapes = {name: parameter.shape for name, parameter in layer.named_parameters()}
    names = shapes.keys()
    head_norms = _HEAD_NORMS & names
    return (
        names >= _NEEDED
        and names <= _NEEDED | _BIASES | _HEAD_NORMS
        and (not head_norms or head_norms == _HEAD_NORMS)
        and all(shapes[name] == (size,) for name in head_norms)
    )


def _windows(config: Any) -> tuple[int | None, ...]:
    """As transformers has it: Mistral's window is every layer's, Qwen names the layers that have one."""
    count: int = config.num_hidden_layers
    window: int | None = getattr(config, "sliding_window", None) or None
    if config.model_type == "mistral":
        return (window,) * count
    kinds = getattr(config, "layer_types", None) or ("full_attention",) * count
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


class Product:
    """x [T, in] to x @ w.T + bias [T, out], by oneDNN's own layout of w where it has one."""

    __slots__ = ("_bias", "_packed", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._bias = bias
        self._packed = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and can_pack()
        if self._packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return out
        return F.linear(x, self._weight, self._bias)


@cache
def can_pack() -> bool:
    """Whether this torch and this processor multiply bfloat16 matrices in oneDNN's layout, and rightly."""
    w = torch.arange(-32, 32).remainder(7).repeat(64, 1).to(torch.bfloat16)
    x = w[:3].flip(1)
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        packed = torch.ops.mkldnn._reorder_linear_weight(w, _ROWS_HINT)
        out = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False
    return torch.allclose(out.float(), F.linear(x, w).float(), rtol=0.02)


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One layer. qkv [(Q + 2 KV) D, H] and gate_up [2 I, H] are what transformers holds as five matrices.

    before and between: the norms before attention and before the gate, as `norm_gain` has them.
    """

    before: torch.Tensor
    qkv: Product
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Product
    between: torch.Tensor
    gate_up: Product
    down: Product


def fuse_layers(skeleton: Skeleton, release: Callable[[int], None]) -> list[FusedLayer]:
    """Every layer's bound weights in their new form; release(i) is called once layer i's can go.

    Layer by layer, so that no more than one layer is held twice.
    """
    fused = []
    for index, layer in enumerate(skeleton.layers):
        fused.append(_fuse(dict(layer.named_parameters())))
        release(index)
        trim()  # the freed originals would otherwise stay on the heap
    return fused


def norm_gain(weight: torch.Tensor) -> torch.Tensor:
    """A norm's weight times the root of H, float32 [H]: for x over its length instead of its mean square."""
    return weight.float() * math.sqrt(len(weight))


def _fuse(given: dict[str, torch.nn.Parameter]) -> FusedLayer:
    def vector(name: str) -> torch.Tensor | None:
        # Copied: a view would keep the memory of the whole layer.
        return given[name].detach().clone() if name in given else None

    def norm(name: str) -> torch.Tensor:
        return norm_gain(given[f"{name}.weight"].detach())

    def product(*names: str) -> Product:
        weights = [given[f"{name}.weight"].detach() for name in names]
        biases = [vector(f"{name}.bias") for name in names]
        if any(bias is not None for bias in biases):
            biases = [
                w.new_zeros(len(w)) if bias is None else bias for w, bias in zip(weights, biases, strict=True)
            ]
            bias = torch.cat([bias for bias in biases if bias is not None])
        else:
            bias = None
        return Product(torch.cat(weights) if len(weights) > 1 else weights[0].clone(), bias)

    return FusedLayer(
        before=norm("input_layernorm"),
        qkv=product("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        q_norm=vector("self_attn.q_norm.weight"),
        k_norm=vector("self_attn.k_norm.weight"),
        out=product("self_attn.o_proj"),
        between=norm("post_attention_layernorm"),
        gate_up=product("mlp.gate_proj", "mlp.up_proj"),
        down=product("mlp.down_proj"),
    )
