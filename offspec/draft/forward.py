"""What drafters ask of a model, put so that one forward can answer several of them."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from offspec.draft.base import Children, Drafter, Scorer
from offspec.draft.growing_tree import GrowingTree
from offspec.model.fused.forward import LeanModel
from offspec.model.pass_parts import SequenceRows, joined
from offspec.model.runner import TreeModel

# Rows of several forwards whose logits are there at once: of more, a product takes no less time for each.
HEAD_ROWS = 128


# Both run rows of several sequences in one forward.
DraftModel = TreeModel | LeanModel


@dataclass(frozen=True, slots=True)
class Forward:
    """Rows of one sequence that a model is to run. wanted: the last of them, whose logits are the answer."""

    model: DraftModel
    rows: SequenceRows
    wanted: int


# Expands some nodes of a tree: yields forwards, is sent the logits [wanted, V] of each, returns the children.
Expansion = Generator[Forward, torch.Tensor, Children]


def alone(expansion: Expansion) -> Children:
    """Run an expansion to its end, each of its forwards by itself."""
    try:
        forward = next(expansion)
        while True:
            try:
                (logits,) = logits_of(forward.model, states_of([forward]))
            except Exception as error:
                forward = expansion.throw(error)
            else:
                forward = expansion.send(logits)
    except StopIteration as done:
        children: Children = done.value
        return children


class Joinable(Drafter):
    """A drafter whose forwards may be run together with those of its forks."""

    def expand(self, candidates: GrowingTree, nodes: Sequence[int], scorer: Scorer) -> Children:
        return alone(self.expanding(candidates, nodes, scorer))

    def expanding(self, candidates: GrowingTree, nodes: Sequence[int], scorer: Scorer) -> Expansion:
        """`Drafter.expand`, step by step."""
        raise NotImplementedError


def expanding(drafter: Drafter, candidates: GrowingTree, nodes: Sequence[int], scorer: Scorer) -> Expansion:
    """The same of any drafter; one that is not `Joinable` does without forwards of others."""
    if isinstance(drafter, Joinable):
        return (yield from drafter.expanding(candidates, nodes, scorer))
    return drafter.expand(candidates, nodes, scorer)


def states_of(forwards: Sequence[Forward]) -> list[torch.Tensor]:
    """Run forwards of one model together: the last states of the rows that each wants, [wanted, H]."""
    hidden = forwards[0].model.hidden_of([forward.rows for forward in forwards])
    ends = accumulate(len(forward.rows.tokens) for forward in forwards)
    return [hidden[end - forward.wanted : end] for end, forward in zip(ends, forwards, strict=True)]


def logits_of(model: DraftModel, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The logits [wanted, V] of some states, by one product."""
    if len(states) == 1:
        return [model.logits(states[0])]
    return [*model.logits(joined(states)).split([len(rows) for rows in states])]


def head_groups(wanted: Sequence[int]) -> list[slice]:
    """Which of forwards, by the rows that they want, have their logits made together: HEAD_ROWS at most."""
    groups, first, rows = list[slice](), 0, 0
    for place, count in enumerate(wanted):
        if place > first and rows + count > HEAD_ROWS:
            groups.append(slice(first, place))
            first, rows = place, 0
        rows += count
    return [*groups, slice(first, len(wanted))]
