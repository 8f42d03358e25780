"""Growing trees side by side: what several of them ask of one model is answered by one forward."""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from offspec.core.trace import OFF, Timeline
from offspec.draft.forward import DraftModel, Forward, head_groups, logits_of, states_of
from offspec.draft.grow.growing import Growing, Growth, Offer


@dataclass(slots=True)
class _Tree:
    """A tree, how far it is, what it has asked, and when."""

    tree: Growing
    growth: Growth
    asked: Forward | Offer | None = None
    since: float = 0.0

    def go_on(self, answer: object, seconds: float = 0.0) -> None:
        """Give it the answer, and go to its next question. seconds: its share of what the answer took."""
        self._ask(lambda: self.growth.send(answer), seconds)

    def fail(self, error: Exception, seconds: float) -> None:
        """Give it the error in the place of an answer."""
        self._ask(lambda: self.growth.throw(error), seconds)

    def _ask(self, question: Callable[[], Forward | Offer], seconds: float) -> None:
        if self.asked is not None:
            self.tree.elsewhere += time.perf_counter() - self.since - seconds
        try:
            self.asked = question()
        except StopIteration:
            self.asked = None
        self.since = time.perf_counter()


Decide = Callable[[Sequence[tuple[Growing, list[int]]]], Sequence[list[int] | None]]


def grow_in_lockstep(trees: Sequence[Growing], decide: Decide, timeline: Timeline = OFF) -> None:
    """Grow all trees to their ends.

    Args:
        trees: None of which has begun.
        decide: Answers the offers of all trees that go on, each with its tree.
        timeline: Records forwards that several share.
    """
    every = [_Tree(tree, tree.run()) for tree in trees]
    for tree in every:
        tree.go_on(None)
    while waiting := [tree for tree in every if tree.asked is not None]:
        groups: dict[Hashable, list[_Tree]] = {}
        for tree in waiting:
            if isinstance(tree.asked, Forward):
                groups.setdefault(id(tree.asked.model), []).append(tree)
        for group in groups.values():
            _run(group, timeline)
        if not groups:
            offers = [(tree.tree, tree.asked.nodes) for tree in waiting if isinstance(tree.asked, Offer)]
            for tree, chosen in zip(waiting, decide(offers), strict=True):
                tree.go_on(chosen)


def _run(group: Sequence[_Tree], timeline: Timeline) -> None:
    """Answer forwards of one model. An error is that of each that has no answer yet."""
    forwards = [tree.asked for tree in group if isinstance(tree.asked, Forward)]
    wanted = [forward.wanted for forward in forwards]
    began = time.perf_counter()
    try:
        with timeline.span("draft", "step", width=sum(wanted)):
            states = states_of(forwards)
    except Exception as error:
        _fail(group, error, (time.perf_counter() - began) / len(group))
        return
    share = (time.perf_counter() - began) / len(group)
    for some in head_groups(wanted):
        failure = _project(group[some], forwards[0].model, states[some], share)
        if failure is not None:
            _fail(group[some.stop :], failure, share)
            return


def _project(
    group: Sequence[_Tree], model: DraftModel, states: Sequence[torch.Tensor], share: float
) -> Exception | None:
    """Answer some trees with the logits of these states, none of which is kept; the error there was.

    share: seconds of each that the states took.
    """
    began = time.perf_counter()
    try:
        found = logits_of(model, states)
    except Exception as error:
        _fail(group, error, share + (time.perf_counter() - began) / len(group))
        return error
    share += (time.perf_counter() - began) / len(group)
    for tree, logits in zip(group, found, strict=True):
        tree.go_on(logits, share)
    return None


def _fail(group: Sequence[_Tree], error: Exception, share: float) -> None:
    for tree in group:
        tree.fail(error, share)
