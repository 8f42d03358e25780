"""Output matrix and embedding of a target, reduced to common tokens, for training a head.

A softmax over a large vocabulary is the largest cost of a training step. So it is taken over the tokens of
the text (the common tokens) and a random sample of the others, new in each step, which represents all others.

Notation: V vocabulary, H hidden size, C common tokens, R sampled others, n rows.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

from offspec.core.errors import CapacityError
from offspec.model.attention import TreeContext
from offspec.model.loaded import LoadedModel
from offspec.model.parts import TargetParts
from offspec.model.skeleton import Skeleton

_PROBED = 256  # tokens whose logits reveal the model's logit scale


@dataclass(frozen=True, slots=True)
class TokenSample:
    """Tokens of one step's softmax: the common tokens, then the sampled others.

    token [C + R]: ids; weight [C + R]: log of the number of tokens that each represents.
    """

    token: torch.Tensor
    weight: torch.Tensor


class EmbeddingAndHead:
    """Frozen weights. common [C]: token ids by frequency; place [V]: index in `common`, else C."""

    def __init__(
        self,
        matrix: torch.Tensor,
        bias: torch.Tensor | None,
        embedding: torch.Tensor,
        common: torch.Tensor,
        scale: float,
        cap: float | None,
    ) -> None:
        """matrix [V, H] and bias [V] of the head; embedding [C, H] of the common tokens."""
        self.matrix, self.embedding, self.common = matrix, embedding, common
        self._bias, self._scale, self._cap = bias, scale, cap
        self.place = torch.full((len(matrix),), len(common), dtype=torch.int64, device=matrix.device)
        self.place[common] = torch.arange(len(common), device=matrix.device)
        self._common_rows = self.matrix[common]

    @classmethod
    def placeholder(cls, skeleton: Skeleton, dtype: torch.dtype, most: int) -> "EmbeddingAndHead":
        """Return a placeholder for a target that is not loaded, with up to `most` common tokens."""
        matrix = torch.empty(
            skeleton.vocab_size, int(skeleton.config.hidden_size), dtype=dtype, device="meta"
        )
        common = torch.empty(min(most, len(matrix)), dtype=torch.int64, device="meta")
        return cls(matrix, None, matrix[common], common, 1.0, None)

    @property
    def nbytes(self) -> int:
        """Total bytes of the matrices."""
        return self.matrix.nbytes + self.embedding.nbytes + self._common_rows.nbytes

    @cached_property
    def _others(self) -> torch.Tensor:
        return (self.place == len(self.common)).nonzero()[:, 0]

    @property
    def vocab_size(self) -> int:
        return len(self.matrix)

    @property
    def hidden_size(self) -> int:
        return self.matrix.shape[1]

    def draw(self, most: int, random: torch.Generator) -> TokenSample:
        """Return the common tokens and a sample of at most `most` others."""
        count = min(most, len(self._others))
        weight = torch.zeros(len(self.common) + count, device=self.matrix.device)
        if not count:
            return TokenSample(self.common, weight)
        drawn = self._others[torch.randint(len(self._others), (count,), generator=random)]
        weight[len(self.common) :] = math.log(len(self._others) / count)
        return TokenSample(torch.cat([self.common, drawn]), weight)

    def rows(self, columns: TokenSample) -> torch.Tensor:
        """Return the head's rows [C + R, H] for these tokens."""
        return torch.cat([self._common_rows, self.matrix[columns.token[len(self.common) :]]])

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the model's logits, scaled and capped, of states [n, H] for some rows: float32."""
        raw = (hidden.to(rows.dtype) @ rows.T).float()
        if self._bias is not None:
            raw = raw + self._bias[tokens]
        raw = raw * self._scale
        return raw if self._cap is None else self._cap * torch.tanh(raw / self._cap)

    def all_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, V] of states [n, H]: float32."""
        return self.logits(hidden, self.matrix, torch.arange(self.vocab_size, device=hidden.device))


def take_embedding_and_head(
    target: LoadedModel, texts: Iterable[torch.Tensor], most: int
) -> EmbeddingAndHead:
    """Return output matrix and embedding of a loaded target; common are the `most` most frequent tokens.

    Raises CapacityError if the head is not in memory.
    """
    if target.tree_model.streams_head:
        raise CapacityError(
            "training a head needs the target's output matrix in memory, which has no room for it: "
            "raise `memory`",
            needed=target.head_bytes,
            given=0,
        )
    parts = TargetParts(target)
    head = target.skeleton.model.get_output_embeddings()
    matrix = head.weight.detach().clone()
    bias = head.bias.detach().float() if getattr(head, "bias", None) is not None else None
    counts = torch.zeros(len(matrix), dtype=torch.int64)
    for text in texts:
        counts += torch.bincount(text.long(), minlength=len(counts))
    order = torch.sort(counts, descending=True, stable=True).indices[: min(most, len(counts))]
    common = order[counts[order] > 0].to(matrix.device)
    with torch.no_grad():
        _pass(target)
        embedding = torch.cat([parts.embed(part) for part in common.split(1024)]).detach().clone()
        scale, cap = _shape_of_logits(parts, matrix, bias)
    return EmbeddingAndHead(matrix, bias, embedding, common, scale, cap)


def _pass(target: LoadedModel) -> None:
    """Run one token through the target: some models' heads use outputs of their layers."""
    target.tree_model.cache.rewind(0)
    token = torch.zeros(1, dtype=torch.int64, device=target.device)
    target.tree_model.hidden(token, TreeContext.chain(1, target.device))
    target.tree_model.cache.rewind(0)


def _shape_of_logits(
    parts: TargetParts, matrix: torch.Tensor, bias: torch.Tensor | None
) -> tuple[float, float | None]:
    """Return the model's logit scale, estimated from some logits, and its logit cap."""
    cap: float | None = getattr(parts.config, "final_logit_softcapping", None)
    probe = torch.randn(2, matrix.shape[1], generator=torch.Generator().manual_seed(0)).to(matrix)
    seen = parts.project(probe)[:, :_PROBED].double()
    raw = (probe.double() @ matrix[:_PROBED].double().T) + (0 if bias is None else bias[:_PROBED].double())
    if cap is not None:
        seen = torch.atanh((seen / cap).clamp(-0.999, 0.999)) * cap
    return float((raw * seen).sum() / (raw * raw).sum()), cap
