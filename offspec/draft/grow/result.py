"""What growing a tree came to, and what is learnt from it when the target has walked the tree."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from offspec.draft.growing_tree import GrowingTree
from offspec.draft.mix.mixture import Asked, Mixture, Seen
from offspec.sampling.token_tree import ROOT, TokenTree
from offspec_planners.acceptance import Calibration
from offspec_planners.tree_growth import Grown


@dataclass(frozen=True, slots=True)
class GrownTree:
    """A grown tree, the candidate behind each of its nodes, and what there is to learn from.

    every: all candidates; asked: who took part, and what drafters said; recorded: the larger tree that was
    grown for the record, where it came to its full size; recording: whether such a one was to be grown.
    """

    tree: TokenTree
    candidates: NDArray[np.int64]
    steps: int
    every: GrowingTree
    asked: Asked
    recorded: Grown | None = None
    recording: bool = False

    @property
    def children(self) -> Seen:
        """What the main drafter said, by candidate."""
        return self.asked.seen.get(0, {})

    def one_path(self, drawn: bool) -> "GrownTree":
        """A single path of it, for a target that cannot tell branches apart.

        Args:
            drawn: Whether siblings are tested in the order in which they were drawn: then it goes by that
                order, else by score.
        """
        path, tree = [ROOT], self.tree
        while children := sorted(tree.children(path[-1]).values()):
            path.append(children[0] if drawn else max(children, key=lambda child: tree.score[child]))
        kept = self.candidates[path]
        return replace(self, tree=self.every.tree(kept), candidates=kept)

    def learn(self, mixture: Mixture, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        """Teach the sources which tokens the target picked at these tree nodes, the walk in order.

        Where the text ended in the middle of the tree, only the levels down to that end count as expected.
        """
        walked = self.candidates[list(nodes)].tolist()
        scores = self.tree.score
        if tokens[-1] in self.tree.children(nodes[-1]):
            scores = scores[self.tree.depth < len(tokens)]
        expected = float(np.exp(scores).sum())
        for index, seen in self.asked.seen.items():
            calibration = mixture.sources[index].scorer.calibration
            _learn(calibration, seen, walked, tokens)
            calibration.end_pass(expected, len(tokens))
            if self.recorded is not None and index == 0:
                calibration.remember(self.recorded)
        mixture.learn(self.every, walked, tokens, self.asked)

    def settle(
        self, mixture: Mixture, nodes: Sequence[int], tokens: int, seconds: float, link: float | None
    ) -> None:
        """Let the sources be judged by what this pass gave and took in all.

        Who gave an accepted node less than what it took to be in the tree has not guessed it. link: seconds
        that a pass takes at least; None where no source is to be judged by itself.
        """
        every, accepted = self.every, self.candidates[list(nodes[1:])]
        alone = every.score[every.parent[accepted]] + every.said[:, accepted]
        guessed = (alone >= self.tree.score.min() - 1e-6) | every.has_to_come(
            accepted
        )  # that is nobody's merit
        mixture.settle(self.asked, guessed, tokens, seconds, link)


def _learn(calibration: Calibration, seen: Seen, walked: Sequence[int], tokens: Sequence[int]) -> None:
    """A walked node that the drafter was not asked about, or knew nothing of, says nothing about ranks."""
    for depth, (node, token) in enumerate(zip(walked, tokens, strict=True)):
        found = seen.get(node)
        if found is None:
            continue
        children, row = found
        if children.log_prob[row, 0] == -np.inf:
            continue
        hits = np.flatnonzero(children.token[row] == token)
        rank = int(hits[0]) if len(hits) else None
        if children.drawn is None:
            calibration.observe(depth, children.x[row], children.log_prob[row], rank)
        else:  # chance put them in order: that tells nothing of how the draft's scores are to be read
            calibration.table.observe(depth, children.log_prob[row], rank)


def root_alone(root_token: int) -> GrownTree:
    """The tree of plain decoding."""
    return GrownTree(TokenTree.single(root_token), np.array([ROOT]), 0, GrowingTree(root_token), Asked())
