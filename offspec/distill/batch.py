"""What a head learns from in one step: rows of several passages, one behind the other.

Letters: M rows, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offspec.distill.generate_batch import Passage
from offspec.distill.store import Store


@dataclass(frozen=True, slots=True)
class Lesson:
    """tokens [M]; states [M, H] behind the final norm; taps, [M, H] each; left [M]: rows of the same passage
    that follow; asked [M]: whether the row says what comes next in an answer, not in a question.
    """

    tokens: torch.Tensor
    states: torch.Tensor
    taps: tuple[torch.Tensor, ...]
    left: torch.Tensor
    asked: torch.Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def before(self, count: int, behind: int = 0) -> torch.Tensor:
        """Rows [n] from whose states an answer may be guessed, and which `count + behind` others follow.

        The token behind the state is then the root of a tree: the last of a question, or one of an answer.
        """
        rows = (self.left >= max(1, count + behind)).nonzero()[:, 0]
        return rows[self.asked[rows + 1]]


def read_lesson(store: Store, numbers: Sequence[int], device: torch.device, *, whole: bool) -> Lesson:
    """Some passages. whole: their questions, too, of which else only the end is read."""
    read = [store.read(number) for number in numbers]
    starts = [0 if whole else max(0, passage.prompt - 2) for passage in read]
    left = [torch.arange(len(p) - start - 1, -1, -1) for p, start in zip(read, starts, strict=True)]
    asked = [torch.arange(start, len(p)) >= p.prompt - 1 for p, start in zip(read, starts, strict=True)]

    def joined(of: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part[start:] for part, start in zip(of, starts, strict=True)]).to(device)

    taps = tuple(joined([passage.taps[tap] for passage in read]) for tap in range(_taps(read)))
    return Lesson(
        tokens=joined([passage.tokens for passage in read]),
        states=joined([passage.states for passage in read]),
        taps=taps,
        left=torch.cat(left).to(device),
        asked=torch.cat(asked).to(device),
    )


def _taps(passages: Sequence[Passage]) -> int:
    return len(passages[0].taps) if passages else 0
