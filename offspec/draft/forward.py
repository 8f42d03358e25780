"""Requests that drafters make of a model, as generators, so that one forward can answer several of them."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from offspec.draft.base import Children, Drafter, Scorer
from offspec.draft.growing_tree import GrowingTree
from offspec.model.fused.model import FusedModel
from offspec.model.pass_parts import SequenceRows, joined
from offspec.model.runner import TreeModel

# Maximum rows whose logits are computed at once: with more, a product takes no less time per row.
HEAD_ROWS = 128


# Both can run rows of several sequences in one forward.
DraftModel = TreeModel | FusedModel


@dataclass(frozen=True, slots=True)
class Forward:
    """Rows of one sequence for a model to run. output_rows: number of last rows whose logits are returned."""

    model: DraftModel
    rows: SequenceRows
    output_rows: int


# Expands some nodes of a tree: yields forwards, receives the logits [output_rows, V] of each, returns the
# children.
Expansion = Generator[Forward, torch.Tensor, Children]


def alone(expansion: Expansion) -> Children:
    """Run an expansion to its end, each of its forwards separately."""
    try:
        forward = next(expansion)
        while True:
            try:
                (logits,) = compute_logits(forward.model, run_forwards([forward]))
            except Exception as error:
                forward = expansion.throw(error)
            else:
                forward = expansion.send(logits)
    except StopIteration as done:
        children: Children = done.value
        return children


class BatchableDrafter(Drafter):
    """A drafter whose forwards can be batched with those of its forks."""

    def expand(self, candidates: GrowingTree, nodes: Sequence[int], scorer: Scorer) -> Children:
        return alone(self.expand_steps(candidates, nodes, scorer))

    def expand_steps(self, candidates: GrowingTree, nodes: Sequence[int], scorer: Scorer) -> Expansion:
        """Do the work of `Drafter.expand` as a generator of forwards."""
        raise NotImplementedError


def expand_steps(
    drafter: Drafter, candidates: GrowingTree, nodes: Sequence[int], scorer: Scorer
) -> Expansion:
    """Expand with any drafter; one that is not a `BatchableDrafter` yields no forwards."""
    if isinstance(drafter, BatchableDrafter):
        return (yield from drafter.expand_steps(candidates, nodes, scorer))
    return drafter.expand(candidates, nodes, scorer)


def run_forwards(forwards: Sequence[Forward]) -> list[torch.Tensor]:
    """Run forwards of one model together and return the last states that each requested, [output_rows, H]."""
    hidden = forwards[0].model.hidden_of([forward.rows for forward in forwards])
    ends = accumulate(len(forward.rows.tokens) for forward in forwards)
    return [hidden[end - forward.output_rows : end] for end, forward in zip(ends, forwards, strict=True)]


def compute_logits(model: DraftModel, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the logits [output_rows, V] of some states, computed in one product."""
    if len(states) == 1:
        return [model.logits(states[0])]
    return [*model.logits(joined(states)).split([len(rows) for rows in states])]


def logit_groups(wanted: Sequence[int]) -> list[slice]:
    """Group forwards whose logits are computed together, at most HEAD_ROWS rows in a group."""
    groups, first, rows = list[slice](), 0, 0
    for place, count in enumerate(wanted):
        if place > first and rows + count > HEAD_ROWS:
            groups.append(slice(first, place))
            first, rows = place, 0
        rows += count
    return [*groups, slice(first, len(wanted))]
