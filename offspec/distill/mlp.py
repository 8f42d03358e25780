"""The MLP speculator (Wertheimer et al. 2024, arXiv 2404.19124): the state, and each token in turn.

It guesses with the tokens before the guess in view, so that different branches of a tree get different
children. All depths share embedding, output matrix and norm, and those behind the first a projection.
"""

from collections.abc import Iterator

import torch

from offspec.distill.embed_head import Ends
from offspec.distill.student import Lesson, Published, Scores, Teacher

_EPS = 1e-6


class Speculator(torch.nn.Module):
    """The trained weights: rows of the common tokens, and one row for all others.

    Letters: C common tokens, I inner size, n rows.
    """

    def __init__(self, ends: Ends, inner: int, depth: int) -> None:
        super().__init__()
        hidden = ends.hidden_size
        self.state_weight: float = 0.5 ** (0.5 / depth)
        self.token_weight: float = ((1 - self.state_weight**2) * inner / 2) ** 0.5 / self.state_weight
        self.emb = torch.nn.Parameter(_sized(ends.embedding, inner))
        self.other_emb = torch.nn.Parameter(torch.zeros(1, inner))
        self.first = torch.nn.Linear(hidden, inner, bias=False)
        self.later = torch.nn.Linear(inner, inner, bias=False)
        self.weight = torch.nn.Parameter(torch.ones(inner))
        self.bias = torch.nn.Parameter(torch.zeros(inner))
        self.head = torch.nn.Parameter(_sized(ends.matrix[ends.common], inner))
        self.other_head = torch.nn.Parameter(torch.zeros(1, inner))

    def table(self) -> torch.Tensor:
        """Embeddings [C + 1, I]: of the common tokens, and of any other."""
        return torch.cat([self.emb, self.other_emb])

    def rows(self, dtype: torch.dtype) -> torch.Tensor:
        """The output matrix [C + 1, I] of the same."""
        return torch.cat([self.head, self.other_head]).to(dtype)

    def step(self, state: torch.Tensor, tokens: torch.Tensor, *, first: bool) -> torch.Tensor:
        """The next inner state [n, I] from the last one, and the embeddings [n, I] of what was said."""
        moved = self.first(state) if first else self.later(state)
        mixed = moved + self.token_weight * tokens
        size = torch.rsqrt(mixed.square().mean(-1, keepdim=True) + _EPS)
        return torch.nn.functional.gelu(mixed * size * self.weight + self.bias)


class MLP:
    """depth: tokens guessed in a row; inner: size of the state between them."""

    kind = "mlp"
    whole = False

    def __init__(self, ends: Ends, depth: int, inner: int) -> None:
        self.depth, self._inner, self._ends = depth, inner, ends
        self.module = Speculator(ends, inner, depth)

    def losses(self, lesson: Lesson, teacher: Teacher) -> list[torch.Tensor]:
        drawn = len(teacher.columns.token) - len(self._ends.common)
        output, found = self.module.rows(teacher.rows.dtype), []
        for state, rows in self._states(lesson, 0):
            logits = (state.to(output.dtype) @ output.T).float()
            logits = torch.cat([logits[:, :-1], logits[:, -1:].expand(-1, drawn)], -1)
            found.append(teacher.loss(logits, rows + 1))
        return found

    def guesses(self, lesson: Lesson) -> Iterator[Scores]:
        vocabulary, common = self._ends.vocab_size, self._ends.common
        for state, rows in self._states(lesson, 1):
            few = state @ self.module.rows(torch.float32).T
            logits = few[:, -1:].repeat(1, vocabulary)
            logits[:, common] = few[:, :-1]
            yield Scores(logits, rows + 2)

    def _states(self, lesson: Lesson, behind: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """By depth the inner states, and the last row whose token is no guess; `behind` more must follow."""
        places, table = self._ends.place[lesson.tokens], self.module.table()
        rows = lesson.before(1, behind)
        state = lesson.states[rows].float()
        unit = torch.rsqrt(state.square().mean(-1, keepdim=True) + _EPS)  # `scale_input` of the format
        state = state * 2**-0.5 * unit
        for depth in range(self.depth):
            kept = lesson.left[rows] >= depth + 1 + behind
            state, rows = state[kept], rows[kept]
            if not len(rows):
                return
            tokens = torch.nn.functional.embedding(places[rows + depth + 1], table)
            state = self.module.step(state, tokens, first=depth == 0)
            yield state, rows + depth

    def published(self, name: str) -> Published:
        """With `tie_weights`: of what all depths share, one copy; of the projections, two."""
        net, ends = self.module, self._ends
        config = {
            "model_type": "mlp_speculator",
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "base_model_name_or_path": name,
            "emb_dim": ends.hidden_size,
            "inner_dim": self._inner,
            "n_predict": self.depth,
            "n_candidates": self.depth,
            "top_k_tokens_per_head": [4, *[2] * (self.depth - 1)],
            "vocab_size": ends.vocab_size,
            "tie_weights": True,
            "scale_input": True,
        }
        tensors = {
            "emb.0.weight": _spread(net.emb, net.other_emb, ends),
            "head.0.weight": _spread(net.head, net.other_head, ends),
            "ln.0.weight": net.weight,
            "ln.0.bias": net.bias,
            "proj.0.weight": net.first.weight,
            "proj.1.weight": net.later.weight,
        }
        named = {f"speculator.{key}": value.detach() for key, value in tensors.items()}
        return Published(config, "model.safetensors", named)


def _sized(rows: torch.Tensor, inner: int) -> torch.Tensor:
    """A matrix [C, H] as [C, I] of unit variance or less: cut, or filled up with noise of the same size."""
    rows = rows.detach().float()
    rows = rows / rows.square().mean().sqrt().clamp_min(_EPS) * inner**-0.5
    more = inner - rows.shape[1]
    if more <= 0:
        return rows[:, :inner].clone()
    random = torch.Generator().manual_seed(0)
    filling = torch.randn(len(rows), more, generator=random, device="cpu") * inner**-0.5
    return torch.cat([rows, filling.to(rows.device)], 1)


def _spread(common: torch.Tensor, other: torch.Tensor, ends: Ends) -> torch.Tensor:
    """[V, I]: the rows of the common tokens, and of each other token the one row that stands for it."""
    rows = other.detach().repeat(ends.vocab_size, 1)
    rows[ends.common] = common.detach()
    return rows
