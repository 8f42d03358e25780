"""Verification of a tree of draft tokens against the target's choices.

The walk decodes greedily on noisy logits (the Gumbel-max trick): at each node the target's choice is
argmax(processed logits + g), with g fixed by seed, position and token. The choice is an exact sample and does
not depend on the tree, so the emitted tokens are the tokens of decoding without speculation, whatever was
drafted (drafter-invariant coupling: Daliri et al. 2024, arXiv 2408.07978). SpecExec's verification
(Svirschevski et al. 2024) is the same walk; the only difference is that SpecExec ranks the tree without g.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from offspec.core.events import TokenLogprobs
from offspec.sampling.logits_processor import LogitsProcessor, PickedToken
from offspec.sampling.noise import GumbelNoise
from offspec.sampling.token_tree import ROOT, TokenTree


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Tokens that one pass emitted.

    Args:
        nodes: The k accepted nodes, beginning with the root.
        tokens: The k tokens chosen at those nodes; the last is the bonus token and has no node.
        logit_gaps: Difference between the best and second-best noisy logit of each choice, in nats.
        stopped: Whether `stop` ended the walk.
        logprobs: Log-probabilities of each token, if requested.
    """

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]
    logit_gaps: tuple[float, ...]
    stopped: bool
    logprobs: tuple[TokenLogprobs, ...] = ()


Logits = Callable[[Sequence[int]], torch.Tensor]


class LazyLogits:
    """Target logits at the nodes of a tree, computed on demand for several likely nodes together.

    Computing a few rows takes as long as one row: the time to read the output head.

    Args:
        tree: Verified tree.
        logits: Computes the rows [n, V] of n nodes; only called during a walk.
        batch_size: Maximum number of nodes per call.
    """

    def __init__(
        self, tree: TokenTree, logits: Callable[[Sequence[int]], torch.Tensor], batch_size: int
    ) -> None:
        self._tree, self._logits, self._batch_size = tree, logits, batch_size
        self._rows: dict[int, torch.Tensor] = {}

    def __contains__(self, node: int) -> bool:
        return node in self._rows

    def __getitem__(self, node: int) -> torch.Tensor:
        if node not in self._rows:
            self.make(node)
        return self._rows[node]

    def make(self, node: int) -> tuple[list[int], torch.Tensor]:
        """Compute and cache the rows of a node and its likeliest descendants; return nodes and rows."""
        tree, below = self._tree, {node}
        for later, parent in enumerate(tree.parent[node + 1 :].tolist(), node + 1):
            if parent in below:
                below.add(later)
        nodes = sorted(below)
        order = np.argsort(-tree.score[nodes], kind="stable")[: self._batch_size]  # none is above its parent
        some = [nodes[place] for place in order.tolist()]
        rows = self._logits(some)
        self._rows.update(zip(some, rows, strict=True))
        return some, rows


def verify_tree(
    tree: TokenTree,
    rows: LazyLogits,
    processor: LogitsProcessor,
    noise: GumbelNoise | None,
    position: int,
    stop: Callable[[int], bool],
) -> VerifyResult:
    """Follow the target's choices down the tree.

    Args:
        tree: Verified tree.
        rows: Target logits at the nodes.
        processor: Penalties, temperature and filters of the request.
        noise: Noise of the request; None at temperature 0.
        position: Absolute position of the root; the first choice is for position + 1.
        stop: Called with each emitted token, in order; True ends the walk.
    """
    chosen: dict[int, PickedToken] = {}

    def choose(nodes: Sequence[int], logits: torch.Tensor) -> None:
        paths = [tree.path_tokens(node) for node in nodes]
        positions = [position + len(path) + 1 for path in paths]
        chosen.update(zip(nodes, processor.choices(logits, paths, noise, positions), strict=True))

    node, nodes, tokens, gaps = ROOT, list[int](), list[int](), list[float]()
    while True:
        if node not in rows:
            made = rows.make(node)
            if made[1].device.type != "cpu":  # waiting for one choice takes longer than making all of them
                choose(*made)
        if node not in chosen:
            choose([node], rows[node][None])
        token, gap = processor.checked_pick(chosen[node], rows[node])
        nodes.append(node)
        tokens.append(token)
        gaps.append(gap)
        child = tree.children(node).get(token)
        stopped = stop(token)
        if stopped or child is None:
            known = processor.logprobs([rows[node] for node in nodes], tokens)
            return VerifyResult(tuple(nodes), tuple(tokens), tuple(gaps), stopped, known)
        node = child
