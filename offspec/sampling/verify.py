"""Verification: which of the tree's guesses the target agrees with.

The walk decodes greedily on noisy logits (the Gumbel-max trick): at each node the target's choice is
argmax(processed logits + g), with g fixed by seed, position and token. That choice is an exact sample, and
it does not depend on the tree, so the emitted tokens are those of decoding without speculation, whatever
was guessed (drafter-invariant coupling: Daliri et al. 2024, arXiv 2408.07978). SpecExec's verification
(Svirschevski et al. 2024) is the same walk; what differs there is only that the tree is ranked without g.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from offspec.sampling.logits_processor import LogitsProcessor
from offspec.sampling.noise import GumbelNoise
from offspec.sampling.token_tree import ROOT, TokenTree


@dataclass(frozen=True, slots=True)
class Walk:
    """What one pass emitted.

    nodes: the accepted nodes from the root on, k of them; tokens: the k tokens chosen at those nodes, the
    last of which is the bonus token and has no node; gaps: how far the best noisy logit stood above the
    second at each choice, in nats; stopped: the walk ended because `stop` said so.
    """

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]
    gaps: tuple[float, ...]
    stopped: bool


def walk(
    tree: TokenTree,
    logits: Callable[[int], torch.Tensor],
    processor: LogitsProcessor,
    noise: GumbelNoise | None,
    position: int,
    stop: Callable[[int], bool],
) -> Walk:
    """Follow the target down the tree.

    logits(node) gives the target's row [V] for that node, asked for only along the walk; position is the
    absolute position of the root, so the first choice is for position + 1; noise is None at temperature 0;
    stop(token) is asked after each emitted token, in order.
    """
    node, path = ROOT, list[int]()
    nodes, gaps = [ROOT], list[float]()
    while True:
        token, gap = processor.choose(logits(node), path, noise, position + len(path) + 1)
        path.append(token)
        gaps.append(gap)
        child = tree.children(node).get(token)
        stopped = stop(token)
        if stopped or child is None:
            return Walk(tuple(nodes), tuple(path), tuple(gaps), stopped)
        node = child
        nodes.append(node)
