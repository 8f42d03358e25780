"""How many nodes a draft step should expand: measured, since it is a matter of the machine and the draft.

A wide step costs more than a narrow one, by an amount that depends on whether memory or arithmetic bounds
it; a narrow one needs more steps to fill the tree, and fills it better, for it looks at the best first.
"""

import time
from collections.abc import Mapping, Sequence

import torch

from offspec.config import SamplingParams
from offspec.draft.base import Scorer
from offspec.draft.lm import DraftModel
from offspec.model.attention import TreeContext
from offspec.sampling import LogitsProcessor
from offspec_planners.calibrate import TemperatureFit

WIDTHS = (16, 4, 32, 8)  # in the order in which they are measured
WIDEST = max(WIDTHS)

# Levels that a tree grows by before its next level is worth less than another pass; each takes a step,
# however wide.
_DEPTH = 10
_ROUNDS = 3
_ENOUGH_S = 1.0  # a slow draft is measured at fewer widths


@torch.no_grad()
def measure_steps(
    model: DraftModel, device: torch.device, widths: Sequence[int] = WIDTHS
) -> dict[int, float]:
    """Seconds of a step by its width, the least of a few: forward, head, and the ranking of children.

    Takes about a second at most, unless one step does. Measured over an empty cache, and left so.
    """
    cache, vocabulary = model.cache, model.skeleton.vocab_size
    assert cache.length == 0
    scorer = Scorer(LogitsProcessor(SamplingParams(), vocabulary, [], device), None, TemperatureFit())
    found: dict[int, float] = {}
    began = time.perf_counter()
    for width in widths:
        if found and time.perf_counter() - began > _ENOUGH_S:
            break
        tokens = torch.arange(width, device=device).remainder(vocabulary)
        for round_ in range(_ROUNDS + 1):  # the first one makes what later ones find made
            start = time.perf_counter()
            context = TreeContext(0, torch.zeros_like(tokens), 0, torch.eye(width, device=device).bool())
            scorer.children(model.logits(model.hidden(tokens, context)), [], [])
            spent = time.perf_counter() - start
            cache.rewind(0)
            if round_ or spent > _ENOUGH_S:
                found[width] = min(spent, found.get(width, spent))
            if found and time.perf_counter() - began > _ENOUGH_S:
                break
    return dict(sorted(found.items()))


def choose_width(step_seconds: Mapping[int, float], budget: int) -> int:
    """The width that fills a tree of `budget` nodes in the least time.

    That takes a step for every so many nodes, but no fewer than the tree has levels. Of equals, the
    narrowest; where nothing was measured, 16.
    """
    if not step_seconds:
        return WIDTHS[0]

    def seconds(width: int) -> float:
        return step_seconds[width] * max(-(-budget // width), _DEPTH)

    return min(sorted(step_seconds), key=seconds)
