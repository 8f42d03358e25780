"""Sampled draft tokens: distributed as the draft's probabilities, reproducible, valid for Sequoia."""

from collections import Counter
from itertools import permutations

import numpy as np
import torch

from offspec.core.config import SamplingParams
from offspec.draft.sampled_scorer import SamplingScorer
from offspec.sampling.logits_processor import LogitsProcessor
from offspec_planners.acceptance import Calibration
from tests.support.chi_squared import p_value


def _processor(size: int, **params: float) -> LogitsProcessor:
    return LogitsProcessor(SamplingParams(**({"temperature": 1.0} | params)), size, [])


def test_children_follow_the_drafts_distribution() -> None:
    """Ordered pairs, compared with drawing without replacement."""
    law = torch.tensor([8.0, 4.0, 2.0, 1.0]) / 15
    scorer = SamplingScorer(_processor(4), 7, Calibration(), 2)
    children = scorer.children(law.log().expand(3000, 4), [], [5] * 3000)
    found = Counter((first, second) for first, second in children.token.tolist())
    exact = {(a, b): float(law[a] * law[b] / (1 - law[a])) for a, b in permutations(range(4), 2)}
    assert p_value(found, exact) > 1e-3


def test_rows_are_independent_and_reproducible() -> None:
    logits = torch.zeros(6, 50)
    drawn = [
        SamplingScorer(_processor(50), seed, Calibration()).children(logits, [], [9] * 6).token.tolist()
        for seed in (3, 3, 4)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len({tuple(row) for row in drawn[0]}) == 6
    scorer = SamplingScorer(_processor(50), 3, Calibration())
    halves = [scorer.children(logits[:3], [], [9] * 3).token.tolist() for _ in range(2)]
    assert halves[0] + halves[1] == drawn[0], "the batch size changes nothing"


def test_children_carry_their_scores() -> None:
    """Penalties and temperature, no filters; a row with non-finite values proposes nothing."""
    params = SamplingParams(temperature=0.5, top_k=1, repetition_penalty=1.3)
    processor = LogitsProcessor(params, 6, [1])
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    logits[1, 2] = torch.nan
    paths = [[2], [], [3, 4]]
    found = SamplingScorer(processor, 1, Calibration(), 6).children(logits, paths, [4, 4, 4], [1, 0, 2])
    assert found.drawn_scores is not None and found.drawn_scores.shape == (3, 6)
    for row in (0, 2):
        wide = torch.cat([logits[row], torch.tensor([-torch.inf])])
        wanted = processor.draft_scores(wide[None], [paths[row]])[0]
        assert torch.equal(found.drawn_scores[row], wanted)
        assert np.array_equal(found.x[row], wanted[found.token[row]].numpy())
        assert np.isfinite(found.log_prob[row]).tolist() == [True] * 5 + [False]
    assert not np.isfinite(found.log_prob[1]).any()


def test_child_probability_by_rank() -> None:
    calibration = Calibration()
    for _ in range(400):
        calibration.table.observe(1, np.zeros(4, np.float32), 1)
    found = SamplingScorer(_processor(9), 1, calibration, 4).children(torch.zeros(2, 9), [], [3, 3], [0, 1])
    assert np.allclose(np.exp(found.log_prob), calibration.acceptance()[[0, 1], :4], rtol=1e-5)
    assert found.log_prob[1].argmax() == 1
