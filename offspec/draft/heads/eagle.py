"""EAGLE heads as published: a layer that maps a state and the token after it to the state of the next
position.

EAGLE (arXiv 2401.15077; EAGLE-2, 2406.16858, has the same layer): x = fc([embedding; state]), then a decoder
layer without its first norm. The state is the target's final hidden state, so the target's own head turns it
into logits. EAGLE-3 (arXiv 2503.01840): the state is fc of the inputs of some of the target's layers;
attention takes the norms of both, [embedding; state], twice as wide as the layer, and a head of its own
covers a part of the target's vocabulary.

Letters: T rows, S rows they can attend to, E width of a state and of the layer, H of the target, V vocabulary
of the target, Q query heads, KV key heads, D head size.
"""

import copy
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.draft.base import Drafter, Features, RequiredStates
from offspec.draft.heads.base import LAST, OpenedHead, TargetShape
from offspec.draft.heads.eagle_files import EAGLE, EagleFormat, read_format, token_map
from offspec.draft.heads.files import HeadFiles
from offspec.draft.heads.state_drafter import StateBuffer, StateDrafter, StateLayer
from offspec.model.attention import TreeContext
from offspec.model.cache import TreeCache
from offspec.model.parts import TargetParts
from offspec_kernels.chunks import split_evenly
from offspec_kernels.tree_attention import tree_attention

_CHUNK = 1024  # rows of a long prompt whose layer inputs are concatenated together

Product = tuple[Tensor, Tensor | None]  # weight and bias
# Products computed with one matrix: their results are adjacent, in this order.
_JOINED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def opened(files: HeadFiles, target: TargetShape) -> OpenedHead:
    """Open the head in `files`. Raises DraftError and CheckpointError, one line each, if it cannot be
    used.
    """
    facts = read_format(files, target)
    config, first = facts.config, facts.kind == EAGLE
    name = facts.title if first else f"{facts.title} ({facts.known} of {target.vocab_size} tokens)"
    required_states = LAST if first else RequiredStates(layers=facts.taps)
    if not first:
        token_map(files, facts, target.vocab_size)

    def nbytes(rows: int) -> int:
        pairs = 2 * config.num_key_value_heads * config.head_dim
        numbers = files.elements(facts.stored.values()) + rows * (pairs + config.hidden_size)
        return int(numbers * target.dtype.itemsize)

    def load(parts: TargetParts, rows: int) -> Drafter:
        weights = _read_weights(files, facts, parts.dtype, parts.device)
        layer: EagleLayer
        if first:
            layer = Eagle1Layer(facts, weights, parts, rows)
        else:
            layer = Eagle3Layer(facts, weights, parts, rows, token_map(files, facts, parts.vocab_size))
        known = StateBuffer(rows, config.hidden_size, parts.dtype, parts.device)
        return StateDrafter(name, layer, required_states, known, parts.device)

    embeds = "embed_tokens.weight" not in facts.stored
    return OpenedHead(facts.kind, name, files.fingerprint, nbytes, load, first, embeds, required_states)


def _read_weights(
    files: HeadFiles, facts: EagleFormat, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Read all weights, by short names; those of joined products by the names above.

    Raises CheckpointError if a value is not finite, and the errors of a damaged file.
    """
    weights: dict[str, Tensor] = {}
    for name, parts in _JOINED.items():
        rows = [files.shape(facts.stored[f"{part}.weight"])[0] for part in parts]
        for kind in ("weight", "bias"):
            tensors = [facts.stored.get(f"{part}.{kind}") for part in parts]
            if stored := next(filter(None, tensors), None):
                joined = torch.zeros(sum(rows), *files.shape(stored)[1:], dtype=dtype, device=device)
                for tensor, part in zip(tensors, joined.split(rows), strict=True):
                    if tensor is not None:  # an absent bias is zeros
                        files.fill(tensor, part)
                weights[f"{name}.{kind}"] = joined
    inner = {part for parts in _JOINED.values() for part in parts}
    for name, stored in facts.stored.items():
        if name != "d2t" and name.rpartition(".")[0] not in inner:
            size, *rest = files.shape(stored)
            size = facts.known if name == "lm_head.weight" else size
            weights[name] = torch.empty(size, *rest, dtype=dtype, device=device)
            files.fill(stored, weights[name])
    return weights


class EagleLayer(StateLayer):
    """Common part of both kinds: attention over a cache of its own, and the MLP.

    facts: format of the head. weights: by the names of `_read_weights`, in the target's dtype and on its
    device; the dictionary is consumed, so that no weight is held twice. rows: initial rows of the cache,
    which grows if needed.
    """

    def __init__(self, facts: EagleFormat, weights: dict[str, Tensor], parts: TargetParts, rows: int) -> None:
        from transformers.activations import ACT2FN
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        self._weights, self._parts, config = weights, parts, facts.config
        self._eps = float(config.rms_norm_eps)
        self._heads, self._pairs = int(config.num_attention_heads), int(config.num_key_value_heads)
        self._size = int(config.head_dim)
        self._activation = ACT2FN[config.hidden_act]
        self._rotary = LlamaRotaryEmbedding(config).to(parts.device)
        self._fc = self._product("fc")
        self._qkv = self._product("self_attn.qkv_proj")
        self._out = self._product("self_attn.o_proj")
        self._gate_up = self._product("mlp.gate_up_proj")
        self._down = self._product("mlp.down_proj")
        self.cache = TreeCache(1, rows)

    def _product(self, name: str) -> Product:
        return self._weights.pop(f"{name}.weight"), self._weights.pop(f"{name}.bias", None)

    def fork(self) -> Self:
        twin = copy.copy(self)
        twin._weights = dict(self._weights)  # the original's cache is emptied when that is closed
        twin.cache = self.cache.empty_copy()
        return twin

    def _joined(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention input [T, E or 2 E], and the residual that its result is added to [T, E]."""
        raise NotImplementedError

    def forward(self, tokens: Tensor, states: Tensor, context: TreeContext) -> Tensor:
        mixed, residual = self._joined(self._embed(tokens), states)
        hidden = residual + F.linear(self._attended(mixed, context), *self._out)
        gate, up = F.linear(self._normed(hidden, "post_attention_layernorm"), *self._gate_up).chunk(2, -1)
        return hidden + F.linear(self._activation(gate) * up, *self._down)

    def _embed(self, tokens: Tensor) -> Tensor:
        own = self._weights.get("embed_tokens.weight")
        if own is None:
            return self._parts.embed(tokens)
        return F.embedding(
            tokens.clamp(max=len(own) - 1), own
        )  # the target's vocabulary may be padded beyond it

    def _normed(self, x: Tensor, name: str) -> Tensor:
        weight = self._weights[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, self._eps)

    def _attended(self, mixed: Tensor, context: TreeContext) -> Tensor:
        """Apply attention: [T, E or 2 E] to [T, Q D]."""
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        rows = self.cache.rows[0]
        start, end = (at - context.prefix for at in (rows.filled, rows.filled + len(mixed)))
        heads = F.linear(mixed, *self._qkv).view(1, len(mixed), -1, self._size).transpose(1, 2)
        query, key, value = heads.split([self._heads, self._pairs, self._pairs], dim=1)
        cos, sin = self._rotary(mixed, context.position[start:end][None])
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        keys, values = rows.update(key, value)
        out = mixed.new_empty(1, len(mixed), self._heads, self._size)
        mask = context.tree_mask(start, end)
        tree_attention(query, keys, values, mask, out=out.transpose(1, 2), exact=False)
        return out.flatten(2)[0]

    def close(self) -> None:
        """Drop the weights and the cache."""
        self._weights.clear()
        nothing = torch.empty(0)
        self._fc = self._qkv = self._out = self._gate_up = self._down = (nothing, None)
        self.cache = TreeCache(1, 0)


class Eagle1Layer(EagleLayer):
    """EAGLE and EAGLE-2: predicts the target's final hidden state."""

    def states(self, features: Features) -> Tensor:
        return features.last

    def logits(self, states: Tensor) -> Tensor:
        return self._parts.project(states)

    def _joined(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        x = F.linear(torch.cat([embedded, states], dim=-1), *self._fc)
        return x, x


class Eagle3Layer(EagleLayer):
    """EAGLE-3: has its own states, fused from inputs of some of the target's layers.

    tokens: the target's id of each token in the head's vocabulary. With `norm_before_residual` of the
    `speculators` format, the norm of the state, and not the state itself, is the residual of attention.
    """

    def __init__(
        self, facts: EagleFormat, weights: dict[str, Tensor], parts: TargetParts, rows: int, tokens: Tensor
    ) -> None:
        super().__init__(facts, weights, parts, rows)
        self._taps, self._norm_before_residual = facts.taps, facts.norm_before_residual
        self._tokens = tokens.to(parts.device)
        self._room = torch.empty(0, parts.vocab_size)

    def states(self, features: Features) -> Tensor:
        parts = [self._fused(features, part) for part in split_evenly(0, len(features), _CHUNK)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _fused(self, features: Features, rows: slice) -> Tensor:
        taps = torch.cat([features.inputs[layer][rows] for layer in self._taps], dim=-1)
        if "input_norm.weight" in self._weights:
            taps = self._normed(taps, "input_norm")
        return F.linear(taps, *self._fc)

    def logits(self, states: Tensor) -> Tensor:
        known = F.linear(self._normed(states, "norm"), self._weights["lm_head.weight"])
        if len(self._room) < len(known):
            self._room = known.new_full((len(known), self._room.shape[1]), -torch.inf)
        logits = self._room[: len(known)]
        logits.index_copy_(1, self._tokens, known)  # other columns were never written: -inf
        return logits

    def _joined(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        normed = self._normed(states, "hidden_norm")
        mixed = torch.cat([self._normed(embedded, "input_layernorm"), normed], dim=-1)
        return mixed, normed if self._norm_before_residual else states
