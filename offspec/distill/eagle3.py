"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): a layer that goes on from the target's states by itself.

Entry i pairs the fused taps of position i with the token at i + 1, and guesses token i + 2. In training it
goes on from its own output for as many steps as it is to guess, as it will have to: step k at row i is the
entry of position i + k, which sees the entries of real states up to i, and those of its own chain.

Letters: M rows, n of them that are asked, H hidden size, Q query heads, KV key heads, D head size, C common
tokens, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from offspec.distill.embed_head import Ends
from offspec.distill.student import Lesson, Published, Scores, Teacher

KeysAndValues = tuple[torch.Tensor, torch.Tensor]  # [Q, M, D] each


def published_taps(layers: int) -> tuple[int, ...]:
    """The layers whose inputs EAGLE-3 takes: near the beginning, in the middle, near the end."""
    usual = (2, layers // 2, layers - 3)
    return usual if 2 < usual[1] < usual[2] else tuple(sorted({0, layers // 2, layers - 1}))


class Layer(torch.nn.Module):
    """The trained weights, under their published names."""

    def __init__(self, config: Any, ends: Ends, taps: int) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        hidden, inner = int(config.hidden_size), int(config.intermediate_size)
        self.heads, self.pairs = int(config.num_attention_heads), int(config.num_key_value_heads)
        self.size, self.eps = int(config.head_dim), float(config.rms_norm_eps)
        self.fc = _linear(taps * hidden, hidden)
        with torch.no_grad():  # the last tap is nearest to what the target's head reads
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
        self.lm_head = torch.nn.Parameter(ends.matrix[ends.common].detach().float().clone())
        self.rotary = LlamaRotaryEmbedding(config)

    def normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.eps)

    def split(
        self, embedded: torch.Tensor, states: torch.Tensor, position: torch.Tensor
    ) -> tuple[torch.Tensor, KeysAndValues]:
        """Queries [Q, M, D], and keys and values, of entries at positions [M]."""
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
        """The states [M, H] that follow, from what attention [Q, M, D] found."""
        hidden = states + self.o_proj(attended.transpose(0, 1).flatten(1))
        inner = self.normed(hidden, self.post_attention_layernorm)
        out: torch.Tensor = hidden + self.down_proj(F.silu(self.gate_proj(inner)) * self.up_proj(inner))
        return out


class Eagle3:
    """depth: steps it is trained for; taps: the layers whose inputs it takes; config: of the target."""

    kind = "eagle3"
    whole = True

    def __init__(self, ends: Ends, depth: int, taps: Sequence[int], config: Any) -> None:
        self.depth, self._taps, self._ends = depth, tuple(taps), ends
        self._config = layer_config(config, ends.vocab_size)
        self.module = Layer(self._config, ends, len(self._taps))
        self._embedding = F.pad(ends.embedding.float(), (0, 0, 0, 1))  # nought for any other token

    def losses(self, lesson: Lesson, teacher: Teacher) -> list[torch.Tensor]:
        found = []
        for step, states in enumerate(self._steps(lesson)):
            rows = lesson.before(step + 1)
            if len(rows):
                logits = self._logits(states[rows], teacher.rows.dtype)
                found.append(teacher.common_loss(logits, rows + step + 1))
        return found

    def guesses(self, lesson: Lesson) -> Iterator[Scores]:
        for step, states in enumerate(self._steps(lesson)):
            rows = lesson.before(step + 1, 1)
            few = self._logits(states[rows], torch.float32)
            logits = few.new_full((len(rows), self._ends.vocab_size), -torch.inf)
            logits[:, self._ends.common] = few
            yield Scores(logits, rows + step + 2)

    def _logits(self, states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        normed = self.module.normed(states, self.module.norm)
        return (normed.to(dtype) @ self.module.lm_head.to(dtype).T).float()

    def _steps(self, lesson: Lesson) -> Iterator[torch.Tensor]:
        """By step the states [M, H] that follow; those of rows that have no such token mean nothing."""
        position, mask = _arranged(lesson)
        states = self.module.fc(torch.cat([tap.float() for tap in lesson.taps], -1))
        places = self._ends.place[lesson.tokens]
        rows = torch.arange(len(lesson), device=places.device)
        chain: list[KeysAndValues] = []
        for step in range(self.depth):
            token = places[(rows + step + 1).clamp_max(len(rows) - 1)]
            query, pair = self.module.split(F.embedding(token, self._embedding), states, position + step)
            chain.append(pair)
            states = self.module.finish(_attend(query, chain, mask), states)
            yield states

    def published(self, name: str) -> Published:
        """With a vocabulary of its own, ascending, and the target's embedding, which is left out."""
        net, common = self.module, self._ends.common
        tokens, order = common.sort()
        known = torch.zeros(self._ends.vocab_size, dtype=torch.bool, device=common.device)
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


def _arranged(lesson: Lesson) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions [M] of rows in their passages, and [M, M] which rows each may not see."""
    ends = lesson.left == 0
    passage = torch.cumsum(ends, 0) - ends.long()
    row = torch.arange(len(lesson), device=ends.device)
    starts = torch.cat([row.new_zeros(1), row[ends] + 1])
    other = passage[:, None] != passage[None, :]
    return row - starts[passage], other | (row[None, :] > row[:, None])


def _attend(query: torch.Tensor, chain: Sequence[KeysAndValues], mask: torch.Tensor) -> torch.Tensor:
    """[Q, M, D]: over the first step's entries, as far as each row sees, and the row's own later ones."""
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
    """A LlamaConfig of one layer with the heads and sizes of a target's, whatever its family calls them."""
    from transformers import LlamaConfig

    hidden, heads = int(target.hidden_size), int(target.num_attention_heads)
    rope = getattr(target, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") if isinstance(rope, dict) else None
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=int(_said(target, "intermediate_size") or 4 * hidden),
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=int(_said(target, "num_key_value_heads") or heads),
        head_dim=int(_said(target, "head_dim") or hidden // heads),
        hidden_act="silu",
        max_position_embeddings=int(getattr(target, "max_position_embeddings", None) or _POSITIONS),
        rms_norm_eps=float(getattr(target, "rms_norm_eps", None) or 1e-6),
        rope_parameters={"rope_type": "default", "rope_theta": float(theta or 10_000.0)},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )


def _said(target: Any, name: str) -> Any:
    """A number of a target's configuration; None where it says nothing, or something else of each layer."""
    try:
        return getattr(target, name, None)
    except RuntimeError:  # transformers' own for a number that layers differ in
        return None
