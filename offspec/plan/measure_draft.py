"""Benchmark of a loaded drafter: time of its draft steps on this machine, in a few seconds.

Drafters that need the target's states get random ones: the time of a step does not depend on them.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from offspec.core.config import SamplingParams
from offspec.draft.base import Children, Drafter, Features, Scorer
from offspec.draft.grow.best_first import grow
from offspec.draft.grow.tree_grower import GrowthPolicy
from offspec.draft.growing_tree import GrowingTree
from offspec.draft.mix.mixture import Mixture
from offspec.model.parts import TargetParts
from offspec.sampling.logits_processor import LogitsProcessor
from offspec.sampling.noise import GumbelNoise
from offspec.sampling.token_tree import ROOT
from offspec_planners.acceptance import Calibration
from offspec_planners.json_fields import Points

WIDTHS = (1, 4, 8, 16, 32, 64)

_DRAFT_SECONDS = 2.5  # for steps of all widths
_TEXT = 128  # tokens below whose end trees are grown
_COMMITTED = 8  # tokens that run together with a root, as after a pass with many accepted tokens
_DEEPEST = 12


@torch.no_grad()
def measure_steps(
    drafter: Drafter,
    parts: TargetParts,
    ids: Sequence[int],
    budget: int,
    temperature: float = 0.0,
    check_contention: Callable[[], None] | None = None,
    seconds: float = _DRAFT_SECONDS,
) -> tuple[Points, float]:
    """Return ((width, seconds) of draft steps, extra seconds of the first step after a pass), from grown
    trees.

    Leaves the draft's cache empty.

    Args:
        drafter: The loaded drafter.
        parts: Parts of the target.
        ids: Text below whose end trees are grown.
        budget: Maximum nodes that the draft has room for.
        temperature: Sampling temperature.
        check_contention: Called between draft steps.
        seconds: Time for a second round of widths.
    """
    vocabulary, device = parts.vocab_size, parts.device
    processor = LogitsProcessor(SamplingParams(temperature=temperature), vocabulary, [], device)
    noise = GumbelNoise(0, vocabulary, device) if temperature else None
    scorer = Scorer(processor, noise, Calibration())
    text = list(ids)[: _TEXT + _COMMITTED]
    known = max(len(text) - _COMMITTED, 1)
    widths = [width for width in (16, 8, 32, 4, 64) if width <= budget] or [1]
    steps, first = list[tuple[int, float]](), list[float]()
    started = time.perf_counter()
    try:
        _grow(drafter, scorer, text[:known], 2, 1, check_contention)
        drafter.commit([ROOT])  # later steps find the prompt in the cache
        _feed_states(drafter, parts, 0, known)
        for turn, width in enumerate(2 * widths):
            if turn >= len(widths) and time.perf_counter() - started > seconds:
                break
            drafter.rewind(known)
            looked = _feed_states(drafter, parts, known, len(text) - 1)
            grown = _grow(drafter, scorer, text, min(budget, 4 * width), width, check_contention)
            first += [looked + spent for _, spent in grown[:1]]
            steps += grown[1:]
    finally:
        drafter.rewind(0)
    return _by_width(steps, first)


def _feed_states(drafter: Drafter, parts: TargetParts, start: int, end: int) -> float:
    """Feed states for these positions, if the drafter needs any; return the seconds that takes."""
    wants, shape = drafter.required_states, (max(end - start, 0), parts.hidden_size)
    if not wants or not shape[0]:
        return 0.0
    states = torch.randn(shape, device=parts.device).to(parts.dtype)
    began = time.perf_counter()
    drafter.observe(Features(start, states, dict.fromkeys(wants.layers, states)))
    return time.perf_counter() - began


class _TimedDrafter:
    """A drafter that records the start and width of each of its steps."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self.name = drafter, drafter.name
        self.began: list[tuple[float, int]] = []

    def expand(self, candidates: GrowingTree, nodes: Sequence[int], scorer: Scorer) -> Children:
        self.began.append((time.perf_counter(), len(nodes)))
        return self._drafter.expand(candidates, nodes, scorer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)


def _grow(
    drafter: Drafter,
    scorer: Scorer,
    ids: Sequence[int],
    budget: int,
    width: int,
    look: Callable[[], None] | None,
) -> list[tuple[int, float]]:
    """Return (width, seconds) of the steps that grew one tree."""
    clock: Any = _TimedDrafter(drafter)
    growth = GrowthPolicy(budget, width, min_gain=0.0)
    grow(Mixture.single(clock, scorer), ids, growth, _DEEPEST, check_cancelled=look)
    ends = [began for began, _ in clock.began[1:]] + [time.perf_counter()]
    return [(width, end - began) for (began, width), end in zip(clock.began, ends, strict=True)]


def _by_width(steps: Sequence[tuple[int, float]], first: Sequence[float]) -> tuple[Points, float]:
    """Return the median step near each of the widths, monotonic, and the extra time of the median first
    step.
    """
    points: list[tuple[int, float]] = []
    for width in WIDTHS:
        near = [seconds for wide, seconds in steps if abs(wide - width) <= width // 8]
        if near:
            points.append((width, max(statistics.median(near), points[-1][1] if points else 0.0)))
    if not points:
        return ((1, statistics.median(first)),), 0.0
    return tuple(points), max(statistics.median(first) - points[0][1], 0.0)
