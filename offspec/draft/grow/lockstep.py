"""Growing trees in lockstep: requests of several trees to one model are answered by one forward."""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from offspec.core.trace import OFF, Timeline
from offspec.draft.forward import DraftModel, Forward, compute_logits, logit_groups, run_forwards
from offspec.draft.grow.tree_grower import ExpansionOffer, Growth, TreeGrower


@dataclass(slots=True)
class _Tree:
    """A tree with its generator, its pending request, and the time of that request."""

    tree: TreeGrower
    growth: Growth
    pending: Forward | ExpansionOffer | None = None
    since: float = 0.0

    def send(self, answer: object, seconds: float = 0.0) -> None:
        """Send an answer and advance to the next request. seconds: the tree's share of the time the answer
        took.
        """
        self._ask(lambda: self.growth.send(answer), seconds)

    def fail(self, error: Exception, seconds: float) -> None:
        """Throw an error into the tree's generator in place of an answer."""
        self._ask(lambda: self.growth.throw(error), seconds)

    def _ask(self, question: Callable[[], Forward | ExpansionOffer], seconds: float) -> None:
        if self.pending is not None:
            self.tree.wait_seconds += time.perf_counter() - self.since - seconds
        try:
            self.pending = question()
        except StopIteration:
            self.pending = None
        self.since = time.perf_counter()


Decide = Callable[[Sequence[tuple[TreeGrower, list[int]]]], Sequence[list[int] | None]]


def grow_in_lockstep(trees: Sequence[TreeGrower], decide: Decide, timeline: Timeline = OFF) -> None:
    """Grow all trees to their ends.

    Args:
        trees: Trees, none of which has begun.
        decide: Answers the offers of all unfinished trees, each with its tree.
        timeline: Records forwards that several trees share.
    """
    every = [_Tree(tree, tree.run()) for tree in trees]
    for tree in every:
        tree.send(None)
    while waiting := [tree for tree in every if tree.pending is not None]:
        groups: dict[Hashable, list[_Tree]] = {}
        for tree in waiting:
            if isinstance(tree.pending, Forward):
                groups.setdefault(id(tree.pending.model), []).append(tree)
        for group in groups.values():
            _run(group, timeline)
        if not groups:
            offers = [
                (tree.tree, tree.pending.nodes)
                for tree in waiting
                if isinstance(tree.pending, ExpansionOffer)
            ]
            for tree, chosen in zip(waiting, decide(offers), strict=True):
                tree.send(chosen)


def _run(group: Sequence[_Tree], timeline: Timeline) -> None:
    """Answer forwards of one model. An error goes to every tree that has no answer yet."""
    forwards = [tree.pending for tree in group if isinstance(tree.pending, Forward)]
    wanted = [forward.output_rows for forward in forwards]
    began = time.perf_counter()
    try:
        with timeline.span("draft", "step", width=sum(wanted)):
            states = run_forwards(forwards)
    except Exception as error:
        _fail(group, error, (time.perf_counter() - began) / len(group))
        return
    share = (time.perf_counter() - began) / len(group)
    for some in logit_groups(wanted):
        failure = _project(group[some], forwards[0].model, states[some], share)
        if failure is not None:
            _fail(group[some.stop :], failure, share)
            return


def _project(
    group: Sequence[_Tree], model: DraftModel, states: Sequence[torch.Tensor], share: float
) -> Exception | None:
    """Answer trees with the logits of these states, which are freed; return the error if there was one.

    share: seconds per tree that computing the states took.
    """
    began = time.perf_counter()
    try:
        found = compute_logits(model, states)
    except Exception as error:
        _fail(group, error, share + (time.perf_counter() - began) / len(group))
        return error
    share += (time.perf_counter() - began) / len(group)
    for tree, logits in zip(group, found, strict=True):
        tree.send(logits, share)
    return None


def _fail(group: Sequence[_Tree], error: Exception, share: float) -> None:
    for tree in group:
        tree.fail(error, share)
