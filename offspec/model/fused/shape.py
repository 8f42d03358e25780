"""Which decoders the lean forward computes, and what it has to know of them.

Plain is the shape that most small models have: RMS norms, rotary attention with grouped queries, a gated
product behind SiLU or GELU. Families differ in what `_Family` lists.

Letters: Q query heads, KV key heads, D head size, R numbers of a head that are rotated.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from offspec.model.skeleton import Skeleton

_ROPES = ("default", "linear", "llama3", "yarn", "longrope")  # frequencies fixed, whatever a text's length
_ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
_MODEL, _DECODER = {"model", "lm_head"}, {"embed_tokens", "layers", "norm", "rotary_emb"}
_HEAD_NORMS = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}


@dataclass(frozen=True, slots=True)
class _Family:
    """How a family differs from Llama.

    Args:
        qkv, gate_up: Matrices that a layer has for these, which are one here.
        norms: Names of the norms before and behind attention, before and behind the gated product; "" for
            one that there is not.
        from_one: Whether a norm's weight is what is added to 1.
        all_slide: Whether the configuration's window is every layer's; else layers that have one are named.
        caps: Whether scores and logits have soft caps where the configuration says so.
        activation: What the configuration calls the activation's name.
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
        """Names of the matrices that one product takes, for each of a layer."""
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
    # Its configuration has a cap for scores as well, which the model leaves alone.
    "gemma3_text": _Family(
        norms=_GEMMA2.norms,
        from_one=True,
        caps=frozenset({"final_logit_softcapping"}),
        activation="hidden_activation",
    ),
}
FAMILIES = tuple(_FAMILIES)


@dataclass(frozen=True, slots=True)
class PlainShape:
    """Sizes of a plain decoder, and what its family computes in its own way.

    Args:
        heads: Q.
        kv_heads: KV.
        size: D.
        rotated: R.
        eps: Of every norm.
        scale: Factor of the scores.
        windows: One per layer, None where attention reaches all the way back.
        rotations: One per layer: an index into `rotation_kinds`.
        rotation_kinds: What the rotary embedding is asked for: kinds of layers, or None where all are alike.
        activation: Of the gate.
        score_cap: Soft cap of the scores, None without.
        logit_cap: Soft cap of the logits, None without.
        family: Names of the weights, and how norms hold theirs.
    """

    heads: int
    kv_heads: int
    size: int
    rotated: int
    eps: float
    scale: float
    windows: tuple[int | None, ...]
    rotations: tuple[int, ...]
    rotation_kinds: tuple[str | None, ...]
    activation: Any
    score_cap: float | None
    logit_cap: float | None
    family: _Family

    @property
    def groups(self) -> int:
        return self.heads // self.kv_heads


def plain_shape(skeleton: Skeleton) -> PlainShape | None:
    """The sizes, or None for a model that has anything which the lean forward does not compute."""
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
    # As transformers has it: some families' window is every layer's, others name those that have one.
    window: int | None = getattr(config, "sliding_window", None) or None
    caps = {name: getattr(config, name, None) or None for name in family.caps}
    return PlainShape(
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        rotated=rotated,
        eps=float(config.rms_norm_eps),
        scale=(getattr(config, "query_pre_attn_scalar", None) or size) ** -0.5,
        windows=tuple(window if family.all_slide or of == "sliding_attention" else None for of in named),
        rotations=tuple(kinds.index(kind) if kind in kinds else 0 for kind in named),
        rotation_kinds=kinds,
        activation=activation,
        score_cap=caps.get("attn_logit_softcapping"),
        logit_cap=caps.get("final_logit_softcapping"),
        family=family,
    )


def _children(module: torch.nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _rotations(decoder: Any, config: Any) -> tuple[tuple[str | None, ...], int | None]:
    """Kinds of layers that have rotations of their own, (None,) where all layers share one; and R.

    R is the same of all kinds; None for frequencies that change with the length of a text.
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
