"""Small random EAGLE heads in every published layout, and a naive version of the published formula.

The formula runs over whole paths, entry by entry, without a cache or a tree. Letters: T entries, E width.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from offspec.draft.base import Features
from tests.support.tiny_models import VOCABULARY

HIDDEN = 32  # of the tiny target
LAYERS = 8
KNOWN = 40  # tokens of EAGLE-3's own vocabulary
OFFSETS = torch.arange(KNOWN) // 2 + 3  # so that the offset of ids grows


@dataclass(frozen=True)
class Head:
    """One published head: tensors by short name, and facts from its configuration."""

    kind: str  # "eagle" or "eagle3"
    width: int = HIDDEN
    taps: tuple[int, ...] = (2, 4, 5)
    speculators: bool = False
    norm_before_residual: bool = False
    config: dict[str, Any] = field(default_factory=dict)  # added to the common part
    outer: dict[str, Any] = field(default_factory=dict)  # wraps the layer's configuration
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def layer(self) -> dict[str, Any]:
        return {
            "hidden_size": self.width,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 1,
            "vocab_size": VOCABULARY,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "model_type": "llama",
            **self.config,
        }


def make_head(
    kind: str,
    *,
    own_embedding: bool = False,
    biases: Sequence[str] = (),
    input_norm: bool = False,
    known: int = KNOWN,
    seed: int = 0,
    **facts: Any,
) -> Head:
    """Return a random head.

    Args:
        biases: Products with a bias.
        known: Size of EAGLE-3's vocabulary.
        facts: Fields of `Head`.
    """
    head = Head(kind, **facts)
    generator = torch.Generator().manual_seed(seed)
    width, inner = head.width, 48
    size = head.config.get("head_dim", width // 4)
    given = width if kind == "eagle" else 2 * width
    fused = 2 * width if kind == "eagle" else len(head.taps) * HIDDEN
    shapes = {
        "fc.weight": (width, fused),
        "self_attn.q_proj.weight": (4 * size, given),
        "self_attn.k_proj.weight": (2 * size, given),
        "self_attn.v_proj.weight": (2 * size, given),
        "self_attn.o_proj.weight": (width, 4 * size),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
        "post_attention_layernorm.weight": (width,),
    }
    shapes |= {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in biases}
    if own_embedding:
        shapes["embed_tokens.weight"] = (VOCABULARY, width)
    if kind == "eagle3":
        shapes |= {name + ".weight": (width,) for name in ("input_layernorm", "hidden_norm", "norm")}
        shapes["lm_head.weight"] = (known, width)
        if input_norm:
            shapes["input_norm.weight"] = (fused,)
    tensors = {
        name: torch.randn(shape, generator=generator) * (0.15 if len(shape) > 1 else 0.1)
        + (1.0 if "norm" in name else 0.0)
        for name, shape in shapes.items()
    }
    if kind == "eagle3" and known < VOCABULARY:
        tensors["d2t"] = OFFSETS.clone()
        tensors["t2d"] = torch.isin(torch.arange(VOCABULARY), torch.arange(known) + OFFSETS)
    return replace(head, tensors=tensors)


def write_head(folder: Path, head: Head) -> Path:
    """Write the head as its authors publish it: as a pickle, or as safetensors for `speculators`."""
    folder.mkdir(parents=True)
    tensors = {_published(head, name): tensor.contiguous() for name, tensor in head.tensors.items()}
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], **head.layer, **head.outer}
    if head.kind == "eagle3":
        config["draft_vocab_size"] = len(head.tensors["lm_head.weight"])
    if head.speculators:
        config = {
            "architectures": ["Eagle3Speculator" if head.kind == "eagle3" else "EagleSpeculator"],
            "speculators_model_type": head.kind,
            "speculators_version": "0.2.0",
            "transformer_layer_config": head.layer,
            **head.outer,
        }
        if head.kind == "eagle3":
            config["draft_vocab_size"] = len(head.tensors["lm_head.weight"])
            config["norm_before_residual"] = head.norm_before_residual
        else:
            config |= {"fusion_bias": "fc.bias" in head.tensors, "layernorms": False}
        save_file(tensors, folder / "model.safetensors")
    else:
        torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _published(head: Head, name: str) -> str:
    of_layer = name.startswith(("self_attn.", "mlp.", "post_attention", "input_layernorm", "hidden_norm"))
    if head.kind == "eagle3":
        return ("layers.0." if head.speculators else "midlayer.") * of_layer + name
    if head.speculators:
        return "fusion_" + name if name.startswith("fc.") else "transformer." * of_layer + name
    return "layers.0." * of_layer + name


def features(start: int, count: int, seed: int = 0) -> Features:
    """Random states of a target with `LAYERS` layers for some positions, the same at every call."""
    generator = torch.Generator().manual_seed(seed)
    every = torch.randn(LAYERS + 2, 200, HIDDEN, generator=generator)[:, start : start + count]
    return Features(start, every[-1], {layer: every[layer] for layer in range(LAYERS + 1)})


class ReferenceEagle:
    """The published formula. embedding [V, H] and project belong to the target."""

    def __init__(self, head: Head, embedding: Tensor, project: Any) -> None:
        self._head, self._tensors, self._project = head, head.tensors, project
        self._embedding = head.tensors.get("embed_tokens.weight", embedding)

    def logits(self, ids: Sequence[int], path: Sequence[int], known: Features) -> Tensor:
        """Return logits [V] after the committed ids and a path below the last. known: all but the last id."""
        assert known.start + len(known) == len(ids) - 1
        states, tokens = self._states(known), [*ids[known.start + 1 :], *path]
        positions = torch.arange(known.start, known.start + len(tokens))
        for end in range(len(states), len(tokens) + 1):
            out = self._layer(torch.tensor(tokens[:end]), states, positions[:end])
            states = torch.cat([states, out[-1:]])
        return self._scores(states[-1])

    def _states(self, known: Features) -> Tensor:
        if self._head.kind == "eagle":
            return known.last
        taps = torch.cat([known.inputs[layer] for layer in self._head.taps], dim=1)
        if "input_norm.weight" in self._tensors:
            taps = self._norm(taps, "input_norm")
        return self._linear(taps, "fc")

    def _scores(self, state: Tensor) -> Tensor:
        if self._head.kind == "eagle":
            scores: Tensor = self._project(state[None])[0]
            return scores
        known = self._tensors["lm_head.weight"] @ self._norm(state, "norm")
        scores = torch.full((VOCABULARY,), -torch.inf)
        offsets = self._tensors.get("d2t", torch.zeros(len(known), dtype=torch.long))
        for index, value in enumerate(known):
            scores[index + offsets[index]] = value
        return scores

    def _layer(self, tokens: Tensor, states: Tensor, positions: Tensor) -> Tensor:
        embedded = self._embedding[tokens]
        if self._head.kind == "eagle":
            mixed = residual = self._linear(torch.cat([embedded, states], dim=1), "fc")
        else:
            normed = self._norm(states, "hidden_norm")
            mixed = torch.cat([self._norm(embedded, "input_layernorm"), normed], dim=1)
            residual = normed if self._head.norm_before_residual else states
        hidden = residual + self._linear(self._attention(mixed, positions), "self_attn.o_proj")
        inner = self._norm(hidden, "post_attention_layernorm")
        gate = torch.nn.functional.silu(self._linear(inner, "mlp.gate_proj"))
        return hidden + self._linear(gate * self._linear(inner, "mlp.up_proj"), "mlp.down_proj")

    def _attention(self, mixed: Tensor, positions: Tensor) -> Tensor:
        size = self._head.layer.get("head_dim", self._head.width // 4)
        query, key, value = (
            self._linear(mixed, f"self_attn.{name}_proj").view(len(mixed), -1, size) for name in "qkv"
        )
        query, key = self._rotate(query, positions), self._rotate(key, positions)
        future = torch.ones(len(mixed), len(mixed), dtype=torch.bool).triu(1)
        heads = []
        for head in range(4):
            pair = head // 2
            scores = query[:, head] @ key[:, pair].T / size**0.5
            heads.append(scores.masked_fill(future, -torch.inf).softmax(1) @ value[:, pair])
        return torch.cat(heads, dim=1)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Apply rotary positions to [T, heads, D], in halves; scaling is linear or none."""
        half = x.shape[-1] // 2
        config = self._head.layer
        factor = (config.get("rope_scaling") or {}).get("factor", 1.0)
        rates = config.get("rope_theta", 10000.0) ** -(torch.arange(half) / half)
        angles = (positions[:, None] / factor * rates)[:, None]
        first, second = x[..., :half], x[..., half:]
        return torch.cat(
            [
                first * angles.cos() - second * angles.sin(),
                second * angles.cos() + first * angles.sin(),
            ],
            dim=-1,
        )

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps: float = self._head.layer["rms_norm_eps"]
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * self._tensors[f"{name}.weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        product: Tensor = x @ self._tensors[f"{name}.weight"].T
        bias = self._tensors.get(f"{name}.bias")
        return product if bias is None else product + bias
