"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): a layer that continues from the target's hidden states.

Entry i combines the fused taps of position i with the token at i + 1, and predicts token i + 2. Training
continues from the head's own output for as many steps as it will draft: step k at row i is the entry of
position i + k, which attends to entries of real states up to i, and to those of its own chain.

Notation: M rows, n of them trained on, H hidden size, Q query heads, KV key heads, D head size, C common
tokens, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from offspec.distill.embed_head import EmbeddingAndHead
from offspec.distill.student import Published, Scores, Teacher, TrainingBatch

KeysAndValues = tuple[torch.Tensor, torch.Tensor]  # [Q, M, D] each


def published_taps(layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs EAGLE-3 takes: near the beginning, in the middle, near the end."""
    usual = (2, layers // 2, layers - 3)
    return usual if 2 < usual[1] < usual[2] else tuple(sorted({0, layers // 2, layers - 1}))


class Layer(torch.nn.Module):
    """The trained weights, under their published names."""

    def __init__(self, config: Any, embed_head: EmbeddingAndHead, taps: int) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        hidden, inner = int(config.hidden_size), int(config.intermediate_size)
        self.heads, self.pairs = int(config.num_attention_heads), int(config.num_key_value_heads)
        self.size, self.eps = int(config.head_dim), float(config.rms_norm_eps)
        self.fc = _linear(taps * hidden, hidden)
        with torch.no_grad():  # start from the last tap, the closest to the input of the target's head
            self.fc.weight[:, -hidden:] += torch.eye(hidden)
        self.q_proj = _linear(2 * hidden, self.heads * self.size)
        self.k_proj = _linear(2 * hidden, self.pairs * self.size)
        self.v_proj = _linear(2 * hidden, self.pairs * self.size)
        self.o_proj = _linear(self.heads * self.size, hidden)
        self.gate_proj, self.up_proj = _linear(hidden, inner), _linear(hidden, inner)
        self.down_proj = _linear(inner, hidden)
        self.input_layernorm = torch.nn.Parameter(torch.ones(hidden))
        self.hidden_norm = torch.nn.Parameter(torch.ones(hidden))
        self.post_attention_layernorm = torch.nn.Parameter(torch.ones(hidden))
        self.norm = torch.nn.Parameter(torch.ones(hidden))
        self.lm_head = torch.nn.Parameter(embed_head.matrix[embed_head.common].detach().float().clone())
        self.rotary = LlamaRotaryEmbedding(config)

    def normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.eps)

    def split(
        self, embedded: torch.Tensor, states: torch.Tensor, position: torch.Tensor
    ) -> tuple[torch.Tensor, KeysAndValues]:
        """Return queries [Q, M, D], and keys and values, of entries at positions [M]."""
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        both = [self.normed(embedded, self.input_layernorm), self.normed(states, self.hidden_norm)]
        mixed = torch.cat(both, -1)
        query, key, value = (
            product(mixed).view(1, len(mixed), -1, self.size).transpose(1, 2)
            for product in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = self.rotary(mixed, position[None])
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        groups = self.heads // self.pairs
        key, value = (part[0].repeat_interleave(groups, 0) for part in (key, value))
        return query[0], (key, value)

    def finish(self, attended: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return the next states [M, H], given the output [Q, M, D] of attention."""
        hidden = states + self.o_proj(attended.transpose(0, 1).flatten(1))
        inner = self.normed(hidden, self.post_attention_layernorm)
        out: torch.Tensor = hidden + self.down_proj(F.silu(self.gate_proj(inner)) * self.up_proj(inner))
        return out


class Eagle3Student:
    """EAGLE-3 student. depth: number of training steps; taps: its input layers; config: the target's."""

    kind = "eagle3"
    whole = True

    def __init__(self, embed_head: EmbeddingAndHead, depth: int, taps: Sequence[int], config: Any) -> None:
        self.depth, self._taps, self._embed_head = depth, tuple(taps), embed_head
        self._config = layer_config(config, embed_head.vocab_size)
        self.module = Layer(self._config, embed_head, len(self._taps))
        self._embedding = F.pad(embed_head.embedding.float(), (0, 0, 0, 1))  # zero for any other token

    def losses(self, batch: TrainingBatch, teacher: Teacher) -> list[torch.Tensor]:
        found = []
        for step, states in enumerate(self._steps(batch)):
            rows = batch.rows_before(step + 1)
            if len(rows):
                logits = self._logits(states[rows], teacher.rows.dtype)
                found.append(teacher.common_loss(logits, rows + step + 1))
        return found

    def predictions(self, batch: TrainingBatch) -> Iterator[Scores]:
        for step, states in enumerate(self._steps(batch)):
            rows = batch.rows_before(step + 1, 1)
            few = self._logits(states[rows], torch.float32)
            logits = few.new_full((len(rows), self._embed_head.vocab_size), -torch.inf)
            logits[:, self._embed_head.common] = few
            yield Scores(logits, rows + step + 2)

    def _logits(self, states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        normed = self.module.normed(states, self.module.norm)
        return (normed.to(dtype) @ self.module.lm_head.to(dtype).T).float()

    def _steps(self, batch: TrainingBatch) -> Iterator[torch.Tensor]:
        """Yield by step the next states [M, H]; rows without that many tokens left are undefined."""
        position, mask = _positions_and_mask(batch)
        states = self.module.fc(torch.cat([tap.float() for tap in batch.taps], -1))
        places = self._embed_head.place[batch.tokens]
        rows = torch.arange(len(batch), device=places.device)
        chain: list[KeysAndValues] = []
        for step in range(self.depth):
            token = places[(rows + step + 1).clamp_max(len(rows) - 1)]
            query, pair = self.module.split(F.embedding(token, self._embedding), states, position + step)
            chain.append(pair)
            states = self.module.finish(_attend(query, chain, mask), states)
            yield states

    def to_checkpoint(self, name: str) -> Published:
        """Return the head with its own vocabulary, ascending, and without the target's embedding."""
        net, common = self.module, self._embed_head.common
        tokens, order = common.sort()
        known = torch.zeros(self._embed_head.vocab_size, dtype=torch.bool, device=common.device)
        known[tokens] = True
        inside = {
            **{f"self_attn.{part}_proj.weight": getattr(net, f"{part}_proj").weight for part in "qkvo"},
            **{
                f"mlp.{part}_proj.weight": getattr(net, f"{part}_proj").weight
                for part in ("gate", "up", "down")
            },
            "input_layernorm.weight": net.input_layernorm,
            "hidden_norm.weight": net.hidden_norm,
            "post_attention_layernorm.weight": net.post_attention_layernorm,
        }
        tensors = {
            "fc.weight": net.fc.weight,
            **{f"midlayer.{part}": value for part, value in inside.items()},
            "norm.weight": net.norm,
            "lm_head.weight": net.lm_head.detach()[order],
            "d2t": tokens - torch.arange(len(tokens), device=tokens.device),
            "t2d": known,
        }
        config = {
            **self._config.to_dict(),
            "architectures": ["LlamaForCausalLMEagle3"],
            "base_model_name_or_path": name,
            "draft_vocab_size": len(tokens),
            "eagle_aux_hidden_state_layer_ids": list(self._taps),
        }
        return Published(config, "model.safetensors", tensors)


def _linear(given: int, made: int) -> torch.nn.Linear:
    linear = torch.nn.Linear(given, made, bias=False)
    torch.nn.init.normal_(linear.weight, std=0.02)
    return linear


def _positions_and_mask(batch: TrainingBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions [M] of rows in their passages, and a mask [M, M] of rows that each cannot see."""
    ends = batch.remaining == 0
    passage = torch.cumsum(ends, 0) - ends.long()
    row = torch.arange(len(batch), device=ends.device)
    starts = torch.cat([row.new_zeros(1), row[ends] + 1])
    other = passage[:, None] != passage[None, :]
    return row - starts[passage], other | (row[None, :] > row[:, None])


def _attend(query: torch.Tensor, chain: Sequence[KeysAndValues], mask: torch.Tensor) -> torch.Tensor:
    """Attend to visible entries of the first step, and to the row's own later ones: [Q, M, D]."""
    (key, value), *later = chain
    scale = query.shape[-1] ** -0.5
    scores = (query @ key.transpose(1, 2) * scale).masked_fill(mask, -torch.inf)
    own = [(query * key).sum(-1, keepdim=True) * scale for key, _ in later]
    weights = torch.cat([scores, *own], -1).softmax(-1)
    out = weights[..., : len(mask)] @ value
    for at, (_, value) in enumerate(later):
        out = out + weights[..., len(mask) + at, None] * value
    return out


_POSITIONS = 4096


def layer_config(target: Any, vocabulary: int) -> Any:
    """Return a LlamaConfig of one layer with the target's heads and sizes, under Llama's names."""
    from transformers import LlamaConfig

    hidden, heads = int(target.hidden_size), int(target.num_attention_heads)
    rope = getattr(target, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") if isinstance(rope, dict) else None
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=int(_config_number(target, "intermediate_size") or 4 * hidden),
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=int(_config_number(target, "num_key_value_heads") or heads),
        head_dim=int(_config_number(target, "head_dim") or hidden // heads),
        hidden_act="silu",
        max_position_embeddings=int(getattr(target, "max_position_embeddings", None) or _POSITIONS),
        rms_norm_eps=float(getattr(target, "rms_norm_eps", None) or 1e-6),
        rope_parameters={"rope_type": "default", "rope_theta": float(theta or 10_000.0)},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )


def _config_number(target: Any, name: str) -> Any:
    """Return a number of a target's configuration; None if it is absent or differs between layers."""
    try:
        return getattr(target, name, None)
    except RuntimeError:  # raised by transformers for a number that differs between layers
        return None
