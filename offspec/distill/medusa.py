"""Medusa heads (Cai et al. 2024, arXiv 2401.10774), each a few residual blocks before the target's own head.

Head i guesses the token 2 + i positions behind the state it sees. With its blocks' weights at nought it is
the target's head, which is where training begins.
"""

from collections.abc import Iterator

import torch

from offspec.distill.embed_head import Ends
from offspec.distill.student import Lesson, Published, Scores, Teacher


class Block(torch.nn.Module):
    """h + SiLU(W h + b)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(size, size)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] to [n, H]."""
        return hidden + torch.nn.functional.silu(self.linear(hidden))


class Medusa:
    """heads: how many; blocks: of each."""

    kind = "medusa"
    whole = False

    def __init__(self, ends: Ends, heads: int, blocks: int) -> None:
        self.depth, self._blocks, self._ends = heads, blocks, ends
        size = ends.hidden_size
        self.module = torch.nn.ModuleList(
            torch.nn.Sequential(*(Block(size) for _ in range(blocks))) for _ in range(heads)
        )

    def losses(self, lesson: Lesson, teacher: Teacher) -> list[torch.Tensor]:
        found, states = [], lesson.states.float()
        for index, head in enumerate(self.module):
            rows = lesson.before(index + 1)
            if len(rows):
                logits = self._ends.logits(head(states[rows]), teacher.rows, teacher.columns.token)
                found.append(teacher.loss(logits, rows + index + 1))
        return found

    def guesses(self, lesson: Lesson) -> Iterator[Scores]:
        states = lesson.states.float()
        for index, head in enumerate(self.module):
            rows = lesson.before(index + 1, 1)
            yield Scores(self._ends.all_logits(head(states[rows])), rows + index + 2)

    def published(self, name: str) -> Published:
        """Version 2 of the format, without output matrices: the target's is used."""
        config = {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "base_model_name_or_path": name,
            "version": "2",
            "medusa_num_heads": self.depth,
            "medusa_num_layers": self._blocks,
            "hidden_size": self._ends.hidden_size,
            "vocab_size": self._ends.vocab_size,
        }
        return Published(config, "medusa_lm_head.safetensors", dict(self.module.state_dict()))
