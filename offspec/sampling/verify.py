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

from offspec.core.events import TokenLogprobs
from offspec.sampling.logits_processor import LogitsProcessor
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


def walk(
    tree: TokenTree,
    logits: Callable[[int], torch.Tensor],
    processor: LogitsProcessor,
    noise: GumbelNoise | None,
    position: int,
    stop: Callable[[int], bool],
) -> Walk:
    """Follow the target's choices down the tree.

    Args:
        tree: What was verified.
        logits: Gives the target's row [V] for a node; called along the walk only.
        processor: Penalties, temperature and filters of the request.
        noise: Of the request; None at temperature 0.
        position: Absolute, of the root: the first choice is for position + 1.
        stop: Called with each emitted token, in order; True ends the walk.
    """
    node, path = ROOT, list[int]()
    nodes, gaps, logprobs = [ROOT], list[float](), list[TokenLogprobs]()
    while True:
        row = logits(node)
        token, gap = processor.choose(row, path, noise, position + len(path) + 1)
        if (known := processor.logprobs(row, token)) is not None:
            logprobs.append(known)
        path.append(token)
        gaps.append(gap)
        child = tree.children(node).get(token)
        stopped = stop(token)
        if stopped or child is None:
            return Walk(tuple(nodes), tuple(path), tuple(gaps), stopped, tuple(logprobs))
        node = child
        nodes.append(node)
