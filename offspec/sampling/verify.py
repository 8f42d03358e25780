"""Verification: which of the tree's guesses the target agrees with.

The walk decodes greedily on noisy logits (the Gumbel-max trick): at each node the target's choice is
argmax(processed logits + g), with g fixed by seed, position and token. That choice is an exact sample, and
it does not depend on the tree, so the emitted tokens are those of decoding without speculation, whatever
was guessed (drafter-invariant coupling: Daliri et al. 2024, arXiv 2408.07978). SpecExec's verification
(Svirschevski et al. 2024) is the same walk; what differs there is only that the tree is ranked without g.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from offspec.core.events import TokenLogprobs
from offspec.sampling.logits_processor import Choice, LogitsProcessor
from offspec.sampling.noise import GumbelNoise
from offspec.sampling.token_tree import ROOT, TokenTree


@dataclass(frozen=True, slots=True)
class Walk:
    """What one pass emitted.

    Args:
        nodes: The k accepted nodes, from the root on.
        tokens: The k tokens chosen at those nodes; the last is the bonus token and has no node.
        gaps: How far the best noisy logit stood above the second at each choice, in nats.
        stopped: Whether `stop` ended the walk.
        logprobs: Of each token, where the request asks for them.
    """

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]
    gaps: tuple[float, ...]
    stopped: bool
    logprobs: tuple[TokenLogprobs, ...] = ()


Logits = Callable[[Sequence[int]], torch.Tensor]


class LikelyRows:
    """The target's rows of logits at the nodes of a tree, made for several likely nodes together.

    The product of a few rows takes as long as that of one: the time to read the head.

    Args:
        tree: What was verified.
        logits: Makes the rows [n, V] of n nodes; called along a walk only.
        together: How many nodes, at most.
    """

    def __init__(
        self, tree: TokenTree, logits: Callable[[Sequence[int]], torch.Tensor], together: int
    ) -> None:
        self._tree, self._logits, self._together = tree, logits, together
        self._rows: dict[int, torch.Tensor] = {}

    def __contains__(self, node: int) -> bool:
        return node in self._rows

    def __getitem__(self, node: int) -> torch.Tensor:
        if node not in self._rows:
            self.make(node)
        return self._rows[node]

    def make(self, node: int) -> tuple[list[int], torch.Tensor]:
        """A node and the likeliest of those below it, and their rows [n, V], which are kept."""
        tree, below = self._tree, {node}
        for later, parent in enumerate(tree.parent[node + 1 :].tolist(), node + 1):
            if parent in below:
                below.add(later)
        nodes = sorted(below)
        order = np.argsort(-tree.score[nodes], kind="stable")[: self._together]  # none is above its parent
        some = [nodes[place] for place in order.tolist()]
        rows = self._logits(some)
        self._rows.update(zip(some, rows, strict=True))
        return some, rows


def walk(
    tree: TokenTree,
    rows: LikelyRows,
    processor: LogitsProcessor,
    noise: GumbelNoise | None,
    position: int,
    stop: Callable[[int], bool],
) -> Walk:
    """Follow the target's choices down the tree.

    Args:
        tree: What was verified.
        rows: The target's logits at its nodes.
        processor: Penalties, temperature and filters of the request.
        noise: Of the request; None at temperature 0.
        position: Absolute, of the root: the first choice is for position + 1.
        stop: Called with each emitted token, in order; True ends the walk.
    """
    chosen: dict[int, Choice] = {}

    def choose(nodes: Sequence[int], logits: torch.Tensor) -> None:
        paths = [tree.path_tokens(node) for node in nodes]
        positions = [position + len(path) + 1 for path in paths]
        chosen.update(zip(nodes, processor.choices(logits, paths, noise, positions), strict=True))

    node, nodes, tokens, gaps = ROOT, list[int](), list[int](), list[float]()
    while True:
        if node not in rows:
            made = rows.make(node)
            if made[1].device.type != "cpu":  # to wait for one choice takes longer than to make them all
                choose(*made)
        if node not in chosen:
            choose([node], rows[node][None])
        token, gap = processor.settled(chosen[node], rows[node])
        nodes.append(node)
        tokens.append(token)
        gaps.append(gap)
        child = tree.children(node).get(token)
        stopped = stop(token)
        if stopped or child is None:
            known = processor.logprobs([rows[node] for node in nodes], tokens)
            return Walk(tuple(nodes), tuple(tokens), tuple(gaps), stopped, known)
        node = child
