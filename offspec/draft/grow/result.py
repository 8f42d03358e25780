"""Result of growing a tree, and learning from it after verification."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from offspec.draft.growing_tree import GrowingTree
from offspec.draft.mix.mixture import GrowthStats, Mixture, Predictions
from offspec.sampling.token_tree import ROOT, TokenTree
from offspec_planners.acceptance import Calibration
from offspec_planners.tree_growth import RecordedTree


@dataclass(frozen=True, slots=True)
class GrownTree:
    """A grown tree, the candidate of each of its nodes, and the data to learn from.

    candidate_tree: all candidates. growth_stats: sources that took part and predictions of drafters.
    recorded: the larger tree grown for the record, if it reached its full size. recording: whether a tree was
    to be recorded.
    """

    tree: TokenTree
    candidates: NDArray[np.int64]
    steps: int
    every: GrowingTree
    growth_stats: GrowthStats
    recorded: RecordedTree | None = None
    recording: bool = False

    @property
    def children(self) -> Predictions:
        """Predictions of the main drafter, by candidate."""
        return self.growth_stats.predictions.get(0, {})

    def one_path(self, drawn: bool) -> "GrownTree":
        """Return a single path of the tree, for a target that does not support branches.

        Args:
            drawn: Whether siblings are tested in the order in which they were drawn: then the path follows
                that order, else the scores.
        """
        path, tree = [ROOT], self.tree
        while children := sorted(tree.children(path[-1]).values()):
            path.append(children[0] if drawn else max(children, key=lambda child: tree.score[child]))
        kept = self.candidates[path]
        return replace(self, tree=self.every.tree(kept), candidates=kept)

    def learn(self, mixture: Mixture, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        """Update the sources with the tokens that the target picked at these tree nodes, in path order.

        If the text ended in the middle of the tree, only the levels down to that end count as expected.
        """
        walked = self.candidates[list(nodes)].tolist()
        scores = self.tree.score
        if tokens[-1] in self.tree.children(nodes[-1]):
            scores = scores[self.tree.depth < len(tokens)]
        expected = float(np.exp(scores).sum())
        for index, seen in self.growth_stats.predictions.items():
            calibration = mixture.sources[index].scorer.calibration
            _learn(calibration, seen, walked, tokens)
            calibration.end_pass(expected, len(tokens))
            if self.recorded is not None and index == 0:
                calibration.remember(self.recorded)
        mixture.learn(self.every, walked, tokens, self.growth_stats)

    def end_pass(
        self, mixture: Mixture, nodes: Sequence[int], tokens: int, seconds: float, link: float | None
    ) -> None:
        """Update the payoff of the sources with this pass's total tokens and seconds.

        A source counts as proposing an accepted node only if its probability was high enough for the node to
        be in the tree. link: minimum seconds of a pass; None if sources are not evaluated separately.
        """
        every, accepted = self.every, self.candidates[list(nodes[1:])]
        alone = every.score[every.parent[accepted]] + every.source_log_probs[:, accepted]
        guessed = (alone >= self.tree.score.min() - 1e-6) | every.is_forced(accepted)  # credited to no source
        mixture.end_pass(self.growth_stats, guessed, tokens, seconds, link)


def _learn(calibration: Calibration, seen: Predictions, walked: Sequence[int], tokens: Sequence[int]) -> None:
    """Update a calibration. Walked nodes without a prediction of the drafter do not count for ranks."""
    for depth, (node, token) in enumerate(zip(walked, tokens, strict=True)):
        found = seen.get(node)
        if found is None:
            continue
        children, row = found
        if children.log_prob[row, 0] == -np.inf:
            continue
        hits = np.flatnonzero(children.token[row] == token)
        rank = int(hits[0]) if len(hits) else None
        if children.drawn_scores is None:
            calibration.observe(depth, children.x[row], children.log_prob[row], rank)
        else:  # drawn order is random: it does not show how to calibrate the draft's scores
            calibration.table.observe(depth, children.log_prob[row], rank)


def root_only(root_token: int) -> GrownTree:
    """Return the tree of decoding without a draft."""
    return GrownTree(
        TokenTree.single(root_token), np.array([ROOT]), 0, GrowingTree(root_token), GrowthStats()
    )
