"""Medusa heads (Cai et al. 2024, arXiv 2401.10774): a few residual blocks each, then the target's head.

Head i predicts the token 2 + i positions after its input state. With zero weights in its blocks it equals the
target's head, which is the initial state of training.
"""

from collections.abc import Iterator

import torch

from offspec.distill.embed_head import EmbeddingAndHead
from offspec.distill.student import Published, Scores, Teacher, TrainingBatch


class Block(torch.nn.Module):
    """Residual block: h + SiLU(W h + b)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(size, size)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [n, H] to [n, H]."""
        return hidden + torch.nn.functional.silu(self.linear(hidden))


class MedusaStudent:
    """Medusa student. heads: number of heads; blocks: blocks per head."""

    kind = "medusa"
    whole = False

    def __init__(self, embed_head: EmbeddingAndHead, heads: int, blocks: int) -> None:
        self.depth, self._blocks, self._embed_head = heads, blocks, embed_head
        size = embed_head.hidden_size
        self.module = torch.nn.ModuleList(
            torch.nn.Sequential(*(Block(size) for _ in range(blocks))) for _ in range(heads)
        )

    def losses(self, batch: TrainingBatch, teacher: Teacher) -> list[torch.Tensor]:
        found, states = [], batch.states.float()
        for index, head in enumerate(self.module):
            rows = batch.rows_before(index + 1)
            if len(rows):
                logits = self._embed_head.logits(head(states[rows]), teacher.rows, teacher.columns.token)
                found.append(teacher.loss(logits, rows + index + 1))
        return found

    def predictions(self, batch: TrainingBatch) -> Iterator[Scores]:
        states = batch.states.float()
        for index, head in enumerate(self.module):
            rows = batch.rows_before(index + 1, 1)
            yield Scores(self._embed_head.all_logits(head(states[rows])), rows + index + 2)

    def to_checkpoint(self, name: str) -> Published:
        """Return version 2 of the format, without output matrices: the target's is used."""
        config = {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "base_model_name_or_path": name,
            "version": "2",
            "medusa_num_heads": self.depth,
            "medusa_num_layers": self._blocks,
            "hidden_size": self._embed_head.hidden_size,
            "vocab_size": self._embed_head.vocab_size,
        }
        return Published(config, "medusa_lm_head.safetensors", dict(self.module.state_dict()))
