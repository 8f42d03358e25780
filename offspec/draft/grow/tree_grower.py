"""One tree during best-first growth: its next request and its results; see `best_first`."""

import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offspec.core.trace import OFF, Timeline
from offspec.draft.forward import Forward, expand_steps
from offspec.draft.grow.result import GrownTree
from offspec.draft.growing_tree import GrowingTree
from offspec.draft.mix.fault_tolerant import FaultTolerantDrafter
from offspec.draft.mix.mixture import GrowthStats, Mixture, Predictions
from offspec.sampling.token_tree import ROOT
from offspec_planners.cost import PassCosts
from offspec_planners.tree_growth import RecordedTree, best_size, max_expanded, pays, worth_expanding

_RECORDED = 128  # nodes
_LOOKUP_NODES = 128  # maximum nodes per lookup request
_LOOKUP_FLOOR = math.log(0.02)  # minimum log-probability of these
_LOOKED_UP = 8  # lookups are also asked if a draft step has fewer nodes than this
_LOOKED_UP_FLOOR = math.log(0.05)  # minimum log-probability of these
_AHEAD_NODES = 32  # nodes that a draft step expands while the target's pass runs
_AHEAD_FLOOR = math.log(1e-5)  # minimum log-probability of these


_KEPT = 0.9  # decay of a running mean, from step to step
_LEAST_PACE, _MOST_PACE = 0.5, 4.0  # larger ratios have other causes, such as a busy machine


@dataclass(slots=True)
class StepPace:
    """Ratio of the measured to the predicted time of draft steps, learned during a run.

    Steps take longer if several trees share one or other processes use the CPU. Timing decides only how large
    trees grow, never which tokens are generated: those do not depend on trees.
    """

    factor: float = 1.0
    _steps: int = 0

    def observe(self, predicted: float, seconds: float) -> None:
        """Add a step. predicted: seconds according to the costs."""
        if not predicted:
            return
        self._steps += 1
        keep = min(1 - 1 / self._steps, _KEPT)
        found = min(max(seconds / predicted, _LEAST_PACE), _MOST_PACE)
        self.factor = keep * self.factor + (1 - keep) * found


@dataclass(frozen=True, slots=True)
class GrowthPolicy:
    """Limits on tree growth.

    Args:
        budget: Maximum nodes of the tree, including the root.
        width: Maximum nodes that a draft step expands.
        min_gain: Growth stops when one more step is expected to add less than this share of the expected
            tokens.
        costs: If given, growth stops instead when no step can raise tokens per second, and the most
            profitable number of nodes is verified.
        record_nodes: Grow to this number of nodes for the record, at any cost, if it exceeds the budget.
        draft_ahead: Whether the draft goes on below a tree while the target's pass runs.
        step_pace: Time ratio of draft steps in this run, which corrects their costs.
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
        """Maximum nodes that are grown, of which the best `budget` are verified."""
        return max(self.budget, self.record)

    @property
    def recording(self) -> bool:
        return self.grown > self.budget

    def behind(self, rows: int) -> "GrowthPolicy":
        """Return the policy for a tree that shares a pass with `rows` rows of a prompt; see
        `PassCosts.behind`.
        """
        return self if self.costs is None else replace(self, costs=self.costs.behind(rows), record=0)

    @property
    def max_expanded(self) -> int:
        """Maximum nodes expanded for one tree: a bound on the draft's work and on its cache rows."""
        return max_expanded(self.grown, self.width)


@dataclass(frozen=True, slots=True)
class ExpansionOffer:
    """Nodes, ascending, that a tree could have its main drafter expand next.

    The answer is the list of nodes to expand. An empty list means that other trees come first and the tree
    may offer again. None means that expansion does not pay and the main drafter is finished.
    """

    nodes: list[int]


# Yields forwards and offers, receives the answers.
Growth = Generator[Forward | ExpansionOffer, Any, None]


@dataclass(frozen=True, slots=True)
class CarriedTree:
    """A tree already grown below the next root, with the main drafter's predictions for its nodes.

    places: node of this tree by node of the verified tree, for nodes that the drafter has computed.
    """

    candidates: GrowingTree
    predictions: Predictions
    places: dict[int, int]


class TreeGrower:
    """A growing tree; `best` is the nodes that would be kept; see `grow`.

    wait_seconds: seconds spent waiting for other trees.
    """

    def __init__(
        self,
        mixture: Mixture,
        ids: Sequence[int],
        policy: GrowthPolicy,
        max_depth: int,
        timeline: Timeline = OFF,
        check_cancelled: Callable[[], None] | None = None,
        carried: CarriedTree | None = None,
    ) -> None:
        """carried: the tree grown below this root earlier, if the main drafter has kept it."""
        active = mixture.active()
        if 0 not in active or not mixture.sources or mixture.format:
            policy = replace(policy, record=0)  # records cover the main drafter alone
        self._mixture, self.policy, self._max_depth = mixture, policy, max_depth
        self._timeline, self._between = timeline, check_cancelled
        self.growth_stats = GrowthStats(
            active, {}, {index: {} for index in active if index < len(mixture.sources)}
        )
        self.wait_seconds = 0.0
        self._candidates = GrowingTree(ids[-1], len(mixture.names))
        if carried is not None and 0 in self.growth_stats.predictions:
            self._candidates, self.growth_stats.predictions[0] = carried.candidates, carried.predictions
        self._ends = np.array(sorted(mixture.ends), np.int64)
        self._best = self._candidates.best(policy.grown)
        self._read = set[int]()  # candidates whose forced continuations were added
        self._steps = 0
        self._silent = set[int]()  # drafters without predictions
        self._costs = None if policy.costs is None else policy.costs.with_steps(policy.pace.factor)
        # These costs apply to the main drafter.
        self._seconds = policy.costs.start if policy.costs and 0 in self.growth_stats.predictions else 0.0
        self._joined = False  # whether other trees share its steps
        self._beyond = False  # whether growth is only for the record, at no cost to this tree
        mixture.start(ids, active, resumes=carried is not None)

    @property
    def can_draft_ahead(self) -> bool:
        """Whether the tree may grow while it is verified: a node outside the verified tree may become the
        next root.
        """
        return self._ahead_drafter is not None

    @property
    def _ahead_drafter(self) -> FaultTolerantDrafter | None:
        """The main drafter, if it can expand nodes during a pass."""
        mixture, main = self._mixture, self._mixture.main
        alone = len(mixture.sources) == 1 and mixture.format is None
        if (
            not (self.policy.ahead and alone and 0 in self.growth_stats.predictions)
            or self._silent
            or main is None
        ):
            return None
        drafter = main.drafter
        return (
            drafter
            if isinstance(drafter, FaultTolerantDrafter) and drafter.ahead_drafter is not None
            else None
        )

    def report_error(self, error: Exception) -> None:
        """Report that the main drafter failed in `draft_ahead`."""
        if (drafter := self._ahead_drafter) is not None:
            drafter.fail(error)

    def draft_ahead(self, should_continue: Callable[[], bool]) -> None:
        """Have the main drafter expand the best nodes, in the tree or not, while `should_continue` returns
        true.

        Raises the drafter's exceptions, which must be passed to `report_error`. While it runs, nothing else
        may use this tree.
        """
        (main,), drafter = self._mixture.sources, self._ahead_drafter
        assert drafter is not None and drafter.ahead_drafter is not None, "it may not be grown on"
        candidates, seen, room = (
            self._candidates,
            self.growth_stats.predictions[0],
            drafter.ahead_drafter.spare,
        )
        while should_continue():
            nodes = self._likeliest(min(_AHEAD_NODES, room))
            if not nodes:
                break
            with self._timeline.span("ahead", "step", width=len(nodes)):
                children = drafter.draft_ahead(candidates, nodes, main.scorer)
            candidates.expanded_by[0, nodes] = True
            tokens, given = children.token, children.log_prob
            candidates.extend(np.array(nodes), tokens, given, weights=self._mixture.weights)
            if children.token.shape[1]:
                seen.update({node: (children, row) for row, node in enumerate(nodes)})
            room -= len(nodes)

    def _likeliest(self, count: int) -> list[int]:
        """Return the best nodes that can still be expanded, ascending, `count` at most."""
        candidates, every = self._candidates, slice(self._candidates.count)
        free = ~candidates.expanded_by[0, every] & (candidates.depth[every] < self._max_depth)
        nodes = np.flatnonzero(free & (candidates.score[every] > _AHEAD_FLOOR))
        if len(self._ends):
            nodes = nodes[~self._is_end(nodes)]
        best = np.argsort(-candidates.score[nodes], kind="stable")[:count]
        return [int(node) for node in np.sort(nodes[best])]

    def carried(self, last: int, token: int) -> CarriedTree | None:
        """Return the tree grown below the child of a candidate that holds this token; None if there is
        none.
        """
        candidates, seen = self._candidates, self.growth_stats.predictions.get(0, {})
        children = candidates.children(last)
        found = children[candidates.token[children] == token]
        if not self.can_draft_ahead or not len(found) or int(found[0]) not in seen:
            return None
        tree, nodes = candidates.subtree(int(found[0]))
        places = {node: place for place, node in enumerate(nodes.tolist()) if node in seen}
        return CarriedTree(tree, {place: seen[node] for node, place in places.items()}, places)

    def set_shared(self) -> None:
        """Mark the tree as grown together with others, and so not for the record. Call before it begins."""
        self.policy, self._joined = replace(self.policy, record=0), True

    def score_of(self, nodes: list[int]) -> NDArray[np.float64]:
        """Return the scores [W] of these nodes."""
        return self._candidates.score[nodes]

    @property
    def scores(self) -> NDArray[np.float64]:
        """Scores [N] of the best nodes."""
        return self._candidates.score[self._best]

    def run(self) -> Growth:
        """Grow the tree, step by step."""
        if self._max_depth < 1:
            return
        self.look_up([ROOT, *self.choose()])
        self._look_up_likely(sorted(self.growth_stats.predictions.get(0, ())))
        # The main drafter comes last, after all other sources have added their nodes.
        order, going = sorted(self.growth_stats.predictions, reverse=True), True
        while going:  # drafters take turns while any of them continues
            going = False
            for index in order:
                going |= yield from self._step(index)

    def choose(self) -> list[int]:
        """Select the best nodes and append forced tokens after them; return the ends of these chains."""
        candidates, format, ends = self._candidates, self._mixture.format, list[int]()
        while True:
            self._best = candidates.best(self.policy.grown)
            fresh = [] if format is None else [node for node in self._best.tolist() if node not in self._read]
            if format is None or not fresh:
                return ends
            self._read.update(fresh)
            for node in fresh:
                room = self._max_depth - int(candidates.depth[node])
                forced = format.forced_tokens(candidates.path_tokens(node), room)
                if forced:
                    ends.append(candidates.append_forced(node, forced))

    def look_up(self, nodes: Sequence[int]) -> None:
        """Ask the lookups for continuations of these nodes."""
        drafters = len(self._mixture.sources)
        for index in self.growth_stats.active:
            if index < drafters:
                continue
            began = time.perf_counter()
            for node in nodes:
                self._graft(node, index)
            self.growth_stats.spent(index, time.perf_counter() - began)

    def _graft(self, node: int, index: int) -> None:
        candidates, room = self._candidates, self._max_depth - int(self._candidates.depth[node])
        asked = candidates.expanded_by[index, node] or candidates.forced[node]
        if asked or room < 1 or self._is_end(np.array([node])).any():
            return
        most = min(_LOOKUP_NODES, self.policy.grown)
        floor = _LOOKUP_FLOOR - float(candidates.score[node])
        lookup = self._mixture.lookups[index - len(self._mixture.sources)]
        path = candidates.path_tokens(node)
        subtree = lookup.continuations(path, self._mixture.noise, most, floor, room)
        candidates.expanded_by[index, node] = True
        subtree = subtree.pruned(self._mixture.ends, self._mixture.format, path)
        if len(subtree.token):
            candidates.graft(node, subtree, index, self._mixture.weights)
            self.choose()

    def _step(self, index: int) -> Generator[Forward | ExpansionOffer, Any, bool]:
        """Have a drafter expand the best nodes it has not expanded; return False if that does not pay."""
        policy, candidates, seen = self.policy, self._candidates, self.growth_stats.predictions[index]
        if index in self._silent or len(seen) + policy.width > policy.max_expanded:
            return False
        nodes = self._frontier(index)
        if not nodes:
            return False
        if index == 0:
            chosen: list[int] | None = yield ExpansionOffer(nodes)
            if not chosen:
                return chosen is not None
            nodes = chosen
        elif seen and not self._pays(nodes, None):
            return False
        if self._between is not None:
            self._between()
        source, began, elsewhere = self._mixture.sources[index], time.perf_counter(), self.wait_seconds
        with self._timeline.span("draft", "step", width=len(nodes)):
            children = yield from expand_steps(source.drafter, candidates, nodes, source.scorer)
        children = children.without(candidates.forced[nodes])
        seconds = time.perf_counter() - began - (self.wait_seconds - elsewhere)
        self.growth_stats.spent(index, seconds)
        if (
            index == 0 and seen and policy.costs is not None and not self._joined
        ):  # the first step reads the text
            policy.pace.observe(float(policy.costs.step_seconds(len(nodes))), seconds)
        candidates.expanded_by[index, nodes] = True
        # A node no better than the last of a full tree will not be in it later: the best only improve, unless
        # another source lowers a score.
        full = len(self._best) == policy.grown
        floor = float(candidates.score[self._best].min()) if full and not self.policy.ahead else -math.inf
        blend = self._mixture.weights
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
        """Ask the lookups for continuations of the likeliest of these nodes."""
        if self._mixture.lookups:
            score = self._candidates.score
            likely = [node for node in nodes if score[node] >= _LOOKED_UP_FLOOR]
            self.look_up(sorted(likely, key=lambda node: -score[node])[:_LOOKED_UP])

    def decide(self, nodes: list[int]) -> list[int] | None:
        """Return the nodes of an offer that the tree would expand if it grew alone."""
        policy, costs, score = self.policy, self._costs, self._candidates.score
        if self.growth_stats.predictions[0] and not self._pays(nodes, costs):
            return None
        if costs and policy.recording and not self._beyond:
            self._beyond = not pays(self.scores, score[nodes], self._seconds, costs, 0.0)
        self._seconds += float(costs.step_seconds(len(nodes))) if costs and not self._beyond else 0.0
        return nodes

    def _frontier(self, index: int) -> list[int]:
        """Return the best nodes to expand: at most `width`, in the tree, with possibly worthwhile children.

        All ancestors of a node precede it: they are older, and their scores are no worse.
        """
        policy, candidates, best = self.policy, self._candidates, self._best
        open_nodes = best[~candidates.expanded_by[index, best] & (candidates.depth[best] < self._max_depth)]
        if len(self._ends):
            open_nodes = open_nodes[~self._is_end(open_nodes)]
        order = np.argsort(-candidates.score[open_nodes], kind="stable")[: policy.width]
        nodes = np.sort(open_nodes[order])
        probability, tree = (np.exp(candidates.score[some], dtype=np.float64) for some in (nodes, best))
        worth = worth_expanding(probability, tree, policy.grown, policy.min_gain)
        return [int(node) for node in nodes[worth]]

    def _is_end(self, nodes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether each node ends the answer if the target takes it; false for the root, which it
        took.
        """
        ends: NDArray[np.bool_] = np.isin(self._candidates.token[nodes], self._ends) & (nodes != ROOT)
        return ends

    def _pays(self, nodes: list[int], costs: PassCosts | None) -> bool:
        """Return whether expanding these nodes pays, after the drafting so far."""
        policy, score = self.policy, self._candidates.score[nodes]
        if policy.recording:
            # A record must be complete even with narrow steps: `min_gain` applies to a fixed number of nodes.
            return pays(self.scores, score, 0.0, None, policy.min_gain * len(nodes) / _RECORDED)
        return pays(self.scores, score, self._seconds, costs, policy.min_gain)

    def descending(self) -> NDArray[np.float64]:
        """Return the scores of the nodes that fit the budget, best first."""
        scores: NDArray[np.float64] = -np.sort(-self._candidates.score[: self._candidates.count])
        return scores[: self.policy.budget]

    def size(self) -> int:
        """Return the number of nodes to verify if the tree is verified alone."""
        scores, costs = self.descending(), self._costs
        return len(scores) if costs is None else best_size(scores, self._seconds, costs)

    def grown(self, size: int) -> GrownTree:
        """Return the grown tree with its `size` best nodes."""
        policy, candidates = self.policy, self._candidates
        kept = candidates.best(size)
        recorded, best = None, self._best
        if policy.recording and len(best) == policy.record and candidates.depth[best].max() < self._max_depth:
            record = candidates.tree(best)
            recorded = RecordedTree(record.parent.astype(np.int32), record.score.astype(np.float32))
        tree = candidates.tree(kept)
        return GrownTree(tree, kept, self._steps, candidates, self.growth_stats, recorded, policy.recording)
