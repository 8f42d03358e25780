"""The ends of a target that a head learns with: its output matrix and its embedding, cut to common tokens.

A softmax over a large vocabulary is most of what a step of training costs. So it is taken over the tokens
that the text is made of, and a random sample of the others, a new one for each step, stands for all of them.

Letters: V vocabulary, H hidden size, C common tokens, R others that were drawn, n rows.
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

_PROBED = 256  # tokens whose logits tell how the family scales them


@dataclass(frozen=True, slots=True)
class Columns:
    """The tokens of one step: the common ones, then those drawn of the others.

    token [C + R]; weight [C + R]: log of how many tokens each stands for.
    """

    token: torch.Tensor
    weight: torch.Tensor


class Ends:
    """Frozen. common [C]: token ids, the most frequent first; place [V]: of a token among them, else C."""

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
    def imagined(cls, skeleton: Skeleton, dtype: torch.dtype, most: int) -> "Ends":
        """Without values: of a target that is not loaded, with `most` common tokens, or its vocabulary."""
        matrix = torch.empty(
            skeleton.vocab_size, int(skeleton.config.hidden_size), dtype=dtype, device="meta"
        )
        common = torch.empty(min(most, len(matrix)), dtype=torch.int64, device="meta")
        return cls(matrix, None, matrix[common], common, 1.0, None)

    @property
    def nbytes(self) -> int:
        """Bytes of its matrices."""
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

    def draw(self, most: int, random: torch.Generator) -> Columns:
        """The common tokens and at most `most` of the others."""
        count = min(most, len(self._others))
        weight = torch.zeros(len(self.common) + count, device=self.matrix.device)
        if not count:
            return Columns(self.common, weight)
        drawn = self._others[torch.randint(len(self._others), (count,), generator=random)]
        weight[len(self.common) :] = math.log(len(self._others) / count)
        return Columns(torch.cat([self.common, drawn]), weight)

    def rows(self, columns: Columns) -> torch.Tensor:
        """The head's rows [C + R, H] of some tokens."""
        return torch.cat([self._common_rows, self.matrix[columns.token[len(self.common) :]]])

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[n, H] times the head's rows of some tokens, as the family makes logits of it: float32."""
        raw = (hidden.to(rows.dtype) @ rows.T).float()
        if self._bias is not None:
            raw = raw + self._bias[tokens]
        raw = raw * self._scale
        return raw if self._cap is None else self._cap * torch.tanh(raw / self._cap)

    def all_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] to [n, V] float32."""
        return self.logits(hidden, self.matrix, torch.arange(self.vocab_size, device=hidden.device))


def take_ends(target: LoadedModel, texts: Iterable[torch.Tensor], most: int) -> Ends:
    """The ends of a loaded target, and of its tokens at most `most`, the most frequent in some texts.

    Raises CapacityError where the head is not in memory.
    """
    if target.tree_model.streams_head:
        raise CapacityError(
            "a head is trained with the target's output matrix in memory, where there is no room for it: "
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
    return Ends(matrix, bias, embedding, common, scale, cap)


def _pass(target: LoadedModel) -> None:
    """One token through the target: some families' heads want to see what their layers returned."""
    target.tree_model.cache.rewind(0)
    token = torch.zeros(1, dtype=torch.int64, device=target.device)
    target.tree_model.hidden(token, TreeContext.chain(1, target.device))
    target.tree_model.cache.rewind(0)


def _shape_of_logits(
    parts: TargetParts, matrix: torch.Tensor, bias: torch.Tensor | None
) -> tuple[float, float | None]:
    """What the family multiplies its logits by, seen in some of them, and where it caps them."""
    cap: float | None = getattr(parts.config, "final_logit_softcapping", None)
    probe = torch.randn(2, matrix.shape[1], generator=torch.Generator().manual_seed(0)).to(matrix)
    seen = parts.project(probe)[:, :_PROBED].double()
    raw = (probe.double() @ matrix[:_PROBED].double().T) + (0 if bias is None else bias[:_PROBED].double())
    if cap is not None:
        seen = torch.atanh((seen / cap).clamp(-0.999, 0.999)) * cap
    return float((raw * seen).sum() / (raw * raw).sum()), cap
