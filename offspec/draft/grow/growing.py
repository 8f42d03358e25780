"""One tree while it is grown best first: what it asks next, and what has come of it; see `best_first`."""

import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offspec.core.trace import OFF, Timeline
from offspec.draft.forward import Forward, expanding
from offspec.draft.grow.result import GrownTree
from offspec.draft.growing_tree import GrowingTree
from offspec.draft.mix.advisory import AdvisoryDrafter
from offspec.draft.mix.mixture import Asked, Mixture, Seen
from offspec.sampling.token_tree import ROOT
from offspec_planners.cost import PassCosts
from offspec_planners.tree_growth import Grown, best_size, max_expanded, pays, promising

_RECORDED = 128  # nodes
_TWIG = 128  # most nodes that a lookup is asked for at once
_TWIG_FLOOR = math.log(0.02)  # the least likely of them
_LOOKED_UP = 8  # nodes of a draft step below which lookups are asked, too
_LOOKED_UP_FLOOR = math.log(0.05)  # the least likely of them
_FORESEEN = 32  # nodes that a draft step expands while the target's pass is on its way
_FORESEEN_FLOOR = math.log(1e-5)  # the least likely of them


_KEPT = 0.9  # of a running mean, from step to step
_LEAST_PACE, _MOST_PACE = 0.5, 4.0  # what is beyond comes of something else, such as a busy machine


@dataclass(slots=True)
class StepPace:
    """How much longer draft steps take than costs say, learned in a run.

    Several trees share a step, or other processes share the processor. Clocks decide how large trees grow,
    never which tokens come: those do not depend on trees.
    """

    factor: float = 1.0
    _steps: int = 0

    def observe(self, predicted: float, seconds: float) -> None:
        """Count a step. predicted: seconds, by the costs."""
        if not predicted:
            return
        self._steps += 1
        keep = min(1 - 1 / self._steps, _KEPT)
        found = min(max(seconds / predicted, _LEAST_PACE), _MOST_PACE)
        self.factor = keep * self.factor + (1 - keep) * found


@dataclass(frozen=True, slots=True)
class GrowthPolicy:
    """How large trees grow.

    Args:
        budget: Most nodes of the tree, root included.
        width: Most nodes that a draft step expands.
        min_gain: Growth stops when one more step is expected to add less than this share of the expected
            tokens.
        costs: Where given, growth stops instead when no step can raise tokens per second, and as many nodes
            are verified as give the most.
        record: Grow to this number of nodes for the record, at any cost, if that is more than the budget.
        ahead: Whether the draft goes on below a tree while the target's pass is on its way.
        pace: Of draft steps in this run, by which their costs are corrected.
    """

    budget: int
    width: int
    min_gain: float = 0.01
    costs: PassCosts | None = None
    record: int = 0
    ahead: bool = False
    pace: StepPace = field(default_factory=StepPace, compare=False)

    @property
    def grown(self) -> int:
        """Most nodes that are grown, of which the best `budget` are verified."""
        return max(self.budget, self.record)

    @property
    def recording(self) -> bool:
        return self.grown > self.budget

    def behind(self, rows: int) -> "GrowthPolicy":
        """The same for a tree that shares a pass with so many rows of a prompt; see `PassCosts.behind`."""
        return self if self.costs is None else replace(self, costs=self.costs.behind(rows), record=0)

    @property
    def max_expanded(self) -> int:
        """Most nodes expanded for one tree: a bound on the draft's work and on the rows of its cache."""
        return max_expanded(self.grown, self.width)


@dataclass(frozen=True, slots=True)
class Offer:
    """Nodes, ascending, that a tree could have its main drafter expand next.

    The answer is which of them; none, where others come first and it may offer again; None, where it does not
    pay and that drafter has done its part.
    """

    nodes: list[int]


# Yields forwards and offers, is sent the answers.
Growth = Generator[Forward | Offer, Any, None]


@dataclass(frozen=True, slots=True)
class Carried:
    """What a pass found grown below the next root: a tree, and what the main drafter said of its nodes.

    places: by node of the tree that was verified, that of this one, where the drafter has computed it.
    """

    candidates: GrowingTree
    seen: Seen
    places: dict[int, int]


class Growing:
    """A tree on its way, `best` being the nodes that would be kept; see `grow`.

    elsewhere: seconds that it waited for others.
    """

    def __init__(
        self,
        mixture: Mixture,
        ids: Sequence[int],
        policy: GrowthPolicy,
        max_depth: int,
        timeline: Timeline = OFF,
        between: Callable[[], None] | None = None,
        carried: Carried | None = None,
    ) -> None:
        """carried: of this root, what was grown below it before, if the main drafter has kept it."""
        active = mixture.active()
        if 0 not in active or not mixture.sources or mixture.format:
            policy = replace(policy, record=0)  # records are of the main drafter by itself
        self._mixture, self.policy, self._max_depth = mixture, policy, max_depth
        self._timeline, self._between = timeline, between
        self.asked = Asked(active, {}, {index: {} for index in active if index < len(mixture.sources)})
        self.elsewhere = 0.0
        self._candidates = GrowingTree(ids[-1], len(mixture.names))
        if carried is not None and 0 in self.asked.seen:
            self._candidates, self.asked.seen[0] = carried.candidates, carried.seen
        self._ends = np.array(sorted(mixture.ends), np.int64)
        self._best = self._candidates.best(policy.grown)
        self._read = set[int]()  # candidates behind which it is known what the format forces
        self._steps = 0
        self._silent = set[int]()  # drafters that have nothing to say
        self._costs = None if policy.costs is None else policy.costs.with_steps(policy.pace.factor)
        # By these costs, of the main drafter.
        self._seconds = policy.costs.start if policy.costs and 0 in self.asked.seen else 0.0
        self._joined = False  # whether others share its steps
        self._beyond = False  # whether what is grown is for the record alone, and no cost of this tree
        mixture.start(ids, active, resumes=carried is not None)

    @property
    def foresees(self) -> bool:
        """Whether it may be grown on while it is verified: what is not in it may become the next root."""
        return self._foresees is not None

    @property
    def _foresees(self) -> AdvisoryDrafter | None:
        """The main drafter, if it may expand nodes beside a pass."""
        mixture, main = self._mixture, self._mixture.main
        alone = len(mixture.sources) == 1 and mixture.format is None
        if not (self.policy.ahead and alone and 0 in self.asked.seen) or self._silent or main is None:
            return None
        drafter = main.drafter
        return drafter if isinstance(drafter, AdvisoryDrafter) and drafter.foresees is not None else None

    def failed(self, error: Exception) -> None:
        """The main drafter failed in `foresee`."""
        if (drafter := self._foresees) is not None:
            drafter.fail(error)

    def foresee(self, goes_on: Callable[[], bool]) -> None:
        """Have the main drafter expand the best nodes of all, in the tree or not, as long as that may go on.

        Raises what the drafter raises, of which `failed` is to be told. While it runs, nobody else may ask
        for anything of this tree.
        """
        (main,), drafter = self._mixture.sources, self._foresees
        assert drafter is not None and drafter.foresees is not None, "it may not be grown on"
        candidates, seen, room = self._candidates, self.asked.seen[0], drafter.foresees.spare
        while goes_on():
            nodes = self._likeliest(min(_FORESEEN, room))
            if not nodes:
                break
            with self._timeline.span("ahead", "step", width=len(nodes)):
                children = drafter.foresee(candidates, nodes, main.scorer)
            candidates.asked[0, nodes] = True
            tokens, given = children.token, children.log_prob
            candidates.extend(np.array(nodes), tokens, given, blend=self._mixture.blend)
            if children.token.shape[1]:
                seen.update({node: (children, row) for row, node in enumerate(nodes)})
            room -= len(nodes)

    def _likeliest(self, count: int) -> list[int]:
        """The best nodes of all that were not expanded and may be, ascending: so many at most."""
        candidates, every = self._candidates, slice(self._candidates.count)
        free = ~candidates.asked[0, every] & (candidates.depth[every] < self._max_depth)
        nodes = np.flatnonzero(free & (candidates.score[every] > _FORESEEN_FLOOR))
        if len(self._ends):
            nodes = nodes[~self._is_end(nodes)]
        best = np.argsort(-candidates.score[nodes], kind="stable")[:count]
        return [int(node) for node in np.sort(nodes[best])]

    def carried(self, last: int, token: int) -> Carried | None:
        """What was grown below the child of a candidate that holds this token; None where nothing was."""
        candidates, seen = self._candidates, self.asked.seen.get(0, {})
        children = candidates.children(last)
        found = children[candidates.token[children] == token]
        if not self.foresees or not len(found) or int(found[0]) not in seen:
            return None
        tree, nodes = candidates.below(int(found[0]))
        places = {node: place for place, node in enumerate(nodes.tolist()) if node in seen}
        return Carried(tree, {place: seen[node] for node, place in places.items()}, places)

    def join(self) -> None:
        """Before it begins: it grows beside others, and so for no record."""
        self.policy, self._joined = replace(self.policy, record=0), True

    def score_of(self, nodes: list[int]) -> NDArray[np.float64]:
        """[W] of these nodes."""
        return self._candidates.score[nodes]

    @property
    def scores(self) -> NDArray[np.float64]:
        """[N] of the best nodes."""
        return self._candidates.score[self._best]

    def run(self) -> Growth:
        """Grow, step by step."""
        if self._max_depth < 1:
            return
        self.look_up([ROOT, *self.choose()])
        self._look_up_likely(sorted(self.asked.seen.get(0, ())))
        # The main drafter comes last, with all that others have found before it.
        order, going = sorted(self.asked.seen, reverse=True), True
        while going:  # each takes its turn, as long as one goes on
            going = False
            for index in order:
                going |= yield from self._step(index)

    def choose(self) -> list[int]:
        """Find the best nodes; what the format forces behind one comes with it. The ends of such chains."""
        candidates, format, ends = self._candidates, self._mixture.format, list[int]()
        while True:
            self._best = candidates.best(self.policy.grown)
            fresh = [] if format is None else [node for node in self._best.tolist() if node not in self._read]
            if format is None or not fresh:
                return ends
            self._read.update(fresh)
            for node in fresh:
                room = self._max_depth - int(candidates.depth[node])
                forced = format.forced(candidates.path_tokens(node), room)
                if forced:
                    ends.append(candidates.force(node, forced))

    def look_up(self, nodes: Sequence[int]) -> None:
        """Ask the lookups what may follow these nodes."""
        drafters = len(self._mixture.sources)
        for index in self.asked.active:
            if index < drafters:
                continue
            began = time.perf_counter()
            for node in nodes:
                self._graft(node, index)
            self.asked.spent(index, time.perf_counter() - began)

    def _graft(self, node: int, index: int) -> None:
        candidates, room = self._candidates, self._max_depth - int(self._candidates.depth[node])
        asked = candidates.asked[index, node] or candidates.settled[node]
        if asked or room < 1 or self._is_end(np.array([node])).any():
            return
        most = min(_TWIG, self.policy.grown)
        floor = _TWIG_FLOOR - float(candidates.score[node])
        lookup = self._mixture.lookups[index - len(self._mixture.sources)]
        path = candidates.path_tokens(node)
        subtree = lookup.below(path, self._mixture.noise, most, floor, room)
        candidates.asked[index, node] = True
        subtree = subtree.closed(self._mixture.ends, self._mixture.format, path)
        if len(subtree.token):
            candidates.graft(node, subtree, index, self._mixture.blend)
            self.choose()

    def _step(self, index: int) -> Generator[Forward | Offer, Any, bool]:
        """Have a drafter expand the best nodes that it was not asked about; False where that does not pay."""
        policy, candidates, seen = self.policy, self._candidates, self.asked.seen[index]
        if index in self._silent or len(seen) + policy.width > policy.max_expanded:
            return False
        nodes = self._frontier(index)
        if not nodes:
            return False
        if index == 0:
            chosen: list[int] | None = yield Offer(nodes)
            if not chosen:
                return chosen is not None
            nodes = chosen
        elif seen and not self._pays(nodes, None):
            return False
        if self._between is not None:
            self._between()
        source, began, elsewhere = self._mixture.sources[index], time.perf_counter(), self.elsewhere
        with self._timeline.span("draft", "step", width=len(nodes)):
            children = yield from expanding(source.drafter, candidates, nodes, source.scorer)
        children = children.without(candidates.settled[nodes])
        seconds = time.perf_counter() - began - (self.elsewhere - elsewhere)
        self.asked.spent(index, seconds)
        if index == 0 and seen and policy.costs is not None and not self._joined:  # the first reads the text
            policy.pace.observe(float(policy.costs.step_seconds(len(nodes))), seconds)
        candidates.asked[index, nodes] = True
        # What is no better than the last of a full tree is not in it, nor later: the best get better, but for
        # what a second opinion takes back.
        full = len(self._best) == policy.grown
        floor = float(candidates.score[self._best].min()) if full and not self.policy.ahead else -math.inf
        blend = self._mixture.blend
        candidates.extend(np.array(nodes), children.token, children.log_prob, floor, index, blend)
        if children.token.shape[1]:
            seen.update({node: (children, row) for row, node in enumerate(nodes)})
        elif nodes[0] == ROOT:
            self._silent.add(index)
        self._steps += 1
        ends = self.choose()
        self._look_up_likely([*nodes, *ends])
        return True

    def _look_up_likely(self, nodes: Sequence[int]) -> None:
        """Ask the lookups what may follow the likeliest of these nodes."""
        if self._mixture.lookups:
            score = self._candidates.score
            likely = [node for node in nodes if score[node] >= _LOOKED_UP_FLOOR]
            self.look_up(sorted(likely, key=lambda node: -score[node])[:_LOOKED_UP])

    def decide(self, nodes: list[int]) -> list[int] | None:
        """What of an offer the tree would have expanded if it grew alone."""
        policy, costs, score = self.policy, self._costs, self._candidates.score
        if self.asked.seen[0] and not self._pays(nodes, costs):
            return None
        if costs and policy.recording and not self._beyond:
            self._beyond = not pays(self.scores, score[nodes], self._seconds, costs, 0.0)
        self._seconds += float(costs.step_seconds(len(nodes))) if costs and not self._beyond else 0.0
        return nodes

    def _frontier(self, index: int) -> list[int]:
        """The best nodes to expand, `width` at most, that are in the tree and may have children worth having.

        Before a node come all of its ancestors, which are no worse, and older.
        """
        policy, candidates, best = self.policy, self._candidates, self._best
        open_nodes = best[~candidates.asked[index, best] & (candidates.depth[best] < self._max_depth)]
        if len(self._ends):
            open_nodes = open_nodes[~self._is_end(open_nodes)]
        order = np.argsort(-candidates.score[open_nodes], kind="stable")[: policy.width]
        nodes = np.sort(open_nodes[order])
        probability, tree = (np.exp(candidates.score[some], dtype=np.float64) for some in (nodes, best))
        worth = promising(probability, tree, policy.grown, policy.min_gain)
        return [int(node) for node in nodes[worth]]

    def _is_end(self, nodes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these nodes end the answer, if the target takes them; never the root, which it took."""
        ends: NDArray[np.bool_] = np.isin(self._candidates.token[nodes], self._ends) & (nodes != ROOT)
        return ends

    def _pays(self, nodes: list[int], costs: PassCosts | None) -> bool:
        """Whether to expand these nodes, after what was drafted so far."""
        policy, score = self.policy, self._candidates.score[nodes]
        if policy.recording:
            # A record must be whole, however narrow its steps: `min_gain` applies to a fixed number of nodes.
            return pays(self.scores, score, 0.0, None, policy.min_gain * len(nodes) / _RECORDED)
        return pays(self.scores, score, self._seconds, costs, policy.min_gain)

    def descending(self) -> NDArray[np.float64]:
        """Scores of the nodes that the budget has room for, the best first."""
        scores: NDArray[np.float64] = -np.sort(-self._candidates.score[: self._candidates.count])
        return scores[: self.policy.budget]

    def size(self) -> int:
        """How many nodes are to be verified if the tree goes alone."""
        scores, costs = self.descending(), self._costs
        return len(scores) if costs is None else best_size(scores, self._seconds, costs)

    def grown(self, size: int) -> GrownTree:
        """What it has come to, and the best nodes of it, so many."""
        policy, candidates = self.policy, self._candidates
        kept = candidates.best(size)
        recorded, best = None, self._best
        if policy.recording and len(best) == policy.record and candidates.depth[best].max() < self._max_depth:
            record = candidates.tree(best)
            recorded = Grown(record.parent.astype(np.int32), record.score.astype(np.float32))
        tree = candidates.tree(kept)
        return GrownTree(tree, kept, self._steps, candidates, self.asked, recorded, policy.recording)
