"""MLP speculator (Wertheimer et al. 2024, arXiv 2404.19124): a state, updated with each draft token.

It sees the draft tokens before its prediction, so different branches of a tree get different children. All
depths share embedding, output matrix and norm; all but the first share a projection.
"""

from collections.abc import Iterator

import torch

from offspec.distill.embed_head import EmbeddingAndHead
from offspec.distill.student import Published, Scores, Teacher, TrainingBatch

_EPS = 1e-6


class Speculator(torch.nn.Module):
    """Trained weights: rows of the common tokens, and one row for all others.

    Notation: C common tokens, I inner size, n rows.
    """

    def __init__(self, embed_head: EmbeddingAndHead, inner: int, depth: int) -> None:
        super().__init__()
        hidden = embed_head.hidden_size
        self.state_weight: float = 0.5 ** (0.5 / depth)
        self.token_weight: float = ((1 - self.state_weight**2) * inner / 2) ** 0.5 / self.state_weight
        self.emb = torch.nn.Parameter(_sized(embed_head.embedding, inner))
        self.other_emb = torch.nn.Parameter(torch.zeros(1, inner))
        self.first = torch.nn.Linear(hidden, inner, bias=False)
        self.later = torch.nn.Linear(inner, inner, bias=False)
        self.weight = torch.nn.Parameter(torch.ones(inner))
        self.bias = torch.nn.Parameter(torch.zeros(inner))
        self.head = torch.nn.Parameter(_sized(embed_head.matrix[embed_head.common], inner))
        self.other_head = torch.nn.Parameter(torch.zeros(1, inner))

    def table(self) -> torch.Tensor:
        """Return embeddings [C + 1, I] of the common tokens and of any other token."""
        return torch.cat([self.emb, self.other_emb])

    def rows(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the output matrix [C + 1, I] of the common tokens and of any other token."""
        return torch.cat([self.head, self.other_head]).to(dtype)

    def step(self, state: torch.Tensor, tokens: torch.Tensor, *, first: bool) -> torch.Tensor:
        """Return the next inner state [n, I], given the last one and the embeddings [n, I] of the tokens."""
        moved = self.first(state) if first else self.later(state)
        mixed = moved + self.token_weight * tokens
        size = torch.rsqrt(mixed.square().mean(-1, keepdim=True) + _EPS)
        return torch.nn.functional.gelu(mixed * size * self.weight + self.bias)


class MLPStudent:
    """MLP speculator student. depth: number of draft tokens; inner: size of its state."""

    kind = "mlp"
    whole = False

    def __init__(self, embed_head: EmbeddingAndHead, depth: int, inner: int) -> None:
        self.depth, self._inner, self._embed_head = depth, inner, embed_head
        self.module = Speculator(embed_head, inner, depth)

    def losses(self, batch: TrainingBatch, teacher: Teacher) -> list[torch.Tensor]:
        drawn = len(teacher.columns.token) - len(self._embed_head.common)
        output, found = self.module.rows(teacher.rows.dtype), []
        for state, rows in self._states(batch, 0):
            logits = (state.to(output.dtype) @ output.T).float()
            logits = torch.cat([logits[:, :-1], logits[:, -1:].expand(-1, drawn)], -1)
            found.append(teacher.loss(logits, rows + 1))
        return found

    def predictions(self, batch: TrainingBatch) -> Iterator[Scores]:
        vocabulary, common = self._embed_head.vocab_size, self._embed_head.common
        for state, rows in self._states(batch, 1):
            few = state @ self.module.rows(torch.float32).T
            logits = few[:, -1:].repeat(1, vocabulary)
            logits[:, common] = few[:, :-1]
            yield Scores(logits, rows + 2)

    def _states(self, batch: TrainingBatch, extra: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield by depth inner states and rows of the last given token. extra: tokens that must follow."""
        places, table = self._embed_head.place[batch.tokens], self.module.table()
        rows = batch.rows_before(1, extra)
        state = batch.states[rows].float()
        unit = torch.rsqrt(state.square().mean(-1, keepdim=True) + _EPS)  # `scale_input` of the format
        state = state * 2**-0.5 * unit
        for depth in range(self.depth):
            kept = batch.remaining[rows] >= depth + 1 + extra
            state, rows = state[kept], rows[kept]
            if not len(rows):
                return
            tokens = torch.nn.functional.embedding(places[rows + depth + 1], table)
            state = self.module.step(state, tokens, first=depth == 0)
            yield state, rows + depth

    def to_checkpoint(self, name: str) -> Published:
        """Return the head with `tie_weights`: one copy of the shared weights, two of the projections."""
        net, embed_head = self.module, self._embed_head
        config = {
            "model_type": "mlp_speculator",
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "base_model_name_or_path": name,
            "emb_dim": embed_head.hidden_size,
            "inner_dim": self._inner,
            "n_predict": self.depth,
            "n_candidates": self.depth,
            "top_k_tokens_per_head": [4, *[2] * (self.depth - 1)],
            "vocab_size": embed_head.vocab_size,
            "tie_weights": True,
            "scale_input": True,
        }
        tensors = {
            "emb.0.weight": _spread(net.emb, net.other_emb, embed_head),
            "head.0.weight": _spread(net.head, net.other_head, embed_head),
            "ln.0.weight": net.weight,
            "ln.0.bias": net.bias,
            "proj.0.weight": net.first.weight,
            "proj.1.weight": net.later.weight,
        }
        named = {f"speculator.{key}": value.detach() for key, value in tensors.items()}
        return Published(config, "model.safetensors", named)


def _sized(rows: torch.Tensor, inner: int) -> torch.Tensor:
    """Return a matrix [C, H] as [C, I] of at most unit variance: truncated, or padded with similar noise."""
    rows = rows.detach().float()
    rows = rows / rows.square().mean().sqrt().clamp_min(_EPS) * inner**-0.5
    more = inner - rows.shape[1]
    if more <= 0:
        return rows[:, :inner].clone()
    random = torch.Generator().manual_seed(0)
    filling = torch.randn(len(rows), more, generator=random, device="cpu") * inner**-0.5
    return torch.cat([rows, filling.to(rows.device)], 1)


def _spread(common: torch.Tensor, other: torch.Tensor, embed_head: EmbeddingAndHead) -> torch.Tensor:
    """Return [V, I]: the rows of the common tokens, and the shared row for each other token."""
    rows = other.detach().repeat(embed_head.vocab_size, 1)
    rows[embed_head.common] = common.detach()
    return rows
