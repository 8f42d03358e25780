"""Decoder shapes that the fused forward supports.

Most small models have this plain shape: RMS norms, rotary attention with grouped queries, and a gated MLP
with SiLU or GELU. `_Family` lists the differences between model families.

Letters: Q query heads, KV key heads, D head size, R numbers of a head that are rotated.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from offspec.model.skeleton import Skeleton

# Types with frequencies that do not depend on the length of a text.
_ROPES = ("default", "linear", "llama3", "yarn", "longrope")
_ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
_MODEL, _DECODER = {"model", "lm_head"}, {"embed_tokens", "layers", "norm", "rotary_emb"}
_HEAD_NORMS = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}


@dataclass(frozen=True, slots=True)
class _Family:
    """Differences of a model family from Llama.

    Args:
        qkv, gate_up: Names of a layer's matrices that are fused into one here.
        norms: Names of the norms before and after attention, and before and after the MLP; "" if absent.
        from_one: Whether norm weights are offsets from 1.
        all_slide: Whether the configured window applies to all layers, instead of only to those listed.
        caps: Configuration entries for soft caps of scores and logits that apply if set.
        activation: Configuration entry with the name of the activation.
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    norms: tuple[str, str, str, str] = ("input_layernorm", "", "post_attention_layernorm", "")
    from_one: bool = False
    all_slide: bool = False
    caps: frozenset[str] = frozenset()
    activation: str = "hidden_act"

    @property
    def products(self) -> tuple[tuple[str, ...], ...]:
        """Names of the matrices of each fused product in a layer."""
        return self.qkv, ("self_attn.o_proj",), self.gate_up, ("mlp.down_proj",)


_LLAMA = _Family()
_GEMMA2 = _Family(
    norms=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    from_one=True,
    caps=frozenset({"attn_logit_softcapping", "final_logit_softcapping"}),
    activation="hidden_activation",
)
_FAMILIES = {
    "llama": _LLAMA,
    "mistral": _Family(all_slide=True),
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "phi3": _Family(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",), all_slide=True),
    "gemma": _Family(from_one=True),
    "gemma2": _GEMMA2,
    # The configuration also has a cap for scores, which the model ignores.
    "gemma3_text": _Family(
        norms=_GEMMA2.norms,
        from_one=True,
        caps=frozenset({"final_logit_softcapping"}),
        activation="hidden_activation",
    ),
}
FAMILIES = tuple(_FAMILIES)


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes of a plain decoder, and the differences of its family.

    Args:
        heads: Q, query heads.
        kv_heads: KV, key heads.
        head_dim: D, head size.
        rotary_dim: R, rotated numbers of a head.
        eps: Epsilon of all norms.
        scale: Factor of the scores.
        windows: Window of each layer; None for full attention.
        rotations: Index into `rotation_kinds` for each layer.
        rotation_kinds: Layer kinds for the rotary embedding, or (None,) if all layers share one rotation.
        activation: Activation function of the gate.
        attn_softcap: Soft cap of the scores, or None.
        logit_softcap: Soft cap of the logits, or None.
        family: Names of the weights and form of the norms.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    eps: float
    scale: float
    windows: tuple[int | None, ...]
    rotations: tuple[int, ...]
    rotation_kinds: tuple[str | None, ...]
    activation: Any
    attn_softcap: float | None
    logit_softcap: float | None
    family: _Family

    @property
    def groups(self) -> int:
        return self.heads // self.kv_heads


def decoder_shape(skeleton: Skeleton) -> DecoderShape | None:
    """Return the shape of a model, or None if the fused forward does not support it."""
    config, decoder = skeleton.config, skeleton.decoder
    family = _FAMILIES.get(config.model_type)
    if family is None or getattr(config, "use_bidirectional_attention", None):
        return None
    activation = _ACTIVATIONS.get(getattr(config, family.activation))
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kinds, rotated = _rotations(decoder, config)
    if activation is None or rotated is None or not (rotated == size or family.qkv != _LLAMA.qkv):
        return None
    if _children(decoder) != _DECODER or _children(skeleton.model) != _MODEL:
        return None
    if not all(_is_plain(layer, family, size) for layer in skeleton.layers):
        return None
    named = getattr(config, "layer_types", None) or ("full_attention",) * config.num_hidden_layers
    # As in transformers: in some families the window applies to all layers, others list the layers.
    window: int | None = getattr(config, "sliding_window", None) or None
    caps = {name: getattr(config, name, None) or None for name in family.caps}
    return DecoderShape(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=size,
        rotary_dim=rotated,
        eps=float(config.rms_norm_eps),
        scale=(getattr(config, "query_pre_attn_scalar", None) or size) ** -0.5,
        windows=tuple(window if family.all_slide or of == "sliding_attention" else None for of in named),
        rotations=tuple(kinds.index(kind) if kind in kinds else 0 for kind in named),
        rotation_kinds=kinds,
        activation=activation,
        attn_softcap=caps.get("attn_logit_softcapping"),
        logit_softcap=caps.get("final_logit_softcapping"),
        family=family,
    )


def _children(module: torch.nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _rotations(decoder: Any, config: Any) -> tuple[tuple[str | None, ...], int | None]:
    """Return the layer kinds with their own rotations, (None,) if all layers share one, and R.

    R is None if it differs between kinds, or if the frequencies depend on the length of a text.
    """
    ropes: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds = tuple(kind for kind, rope in sorted(ropes.items()) if isinstance(rope, dict)) or (None,)
    found: set[int | None] = set()
    for kind in kinds:
        rope = ropes if kind is None else ropes[kind]
        name = "inv_freq" if kind is None else f"{kind}_inv_freq"
        frequencies = getattr(getattr(decoder, "rotary_emb", None), name, None)
        fixed = rope.get("rope_type", "default") in _ROPES
        found.add(2 * len(frequencies) if fixed and frequencies is not None else None)
    return kinds, found.pop() if len(found) == 1 else None


def _is_plain(layer: torch.nn.Module, family: _Family, size: int) -> bool:
    shapes = {name: parameter.shape for name, parameter in layer.named_parameters()}
    names = shapes.keys()
    matrices = [name for names in family.products for name in names]
    needed = {f"{name}.weight" for name in (*matrices, *filter(None, family.norms))}
    biases = {f"{name}.bias" for name in matrices}
    head_norms = _HEAD_NORMS & names
    return (
        names >= needed
        and names <= needed | biases | _HEAD_NORMS
        and (not head_norms or head_norms == _HEAD_NORMS)
        and all(shapes[name] == (size,) for name in head_norms)
    )
