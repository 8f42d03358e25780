"""Guesses that are drawn: by the draft's own law, with numbers of their own, and fit for Sequoia's rule."""

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
import torch

from offspec.core.config import SamplingParams
from offspec.draft.sampled_scorer import DrawingScorer
from offspec.sampling.logits_processor import LogitsProcessor
from offspec.sampling.noise import endless
from offspec.sampling.token_tree import TokenTree
from offspec.sampling.verify import LikelyRows
from offspec.sampling.verify_sequoia import walk_without_replacement
from offspec_planners.acceptance import Calibration
from tests.support.chi_squared import agreement

WORDS, SEEDS = 5, 500


def _processor(size: int, **params: float) -> LogitsProcessor:
    return LogitsProcessor(SamplingParams(**({"temperature": 1.0} | params)), size, [])


def test_children_are_drawn_by_the_draft_s_law() -> None:
    """Ordered pairs, against drawing without replacement."""
    law = torch.tensor([8.0, 4.0, 2.0, 1.0]) / 15
    scorer = DrawingScorer(_processor(4), 7, Calibration(), 2)
    children = scorer.children(law.log().expand(3000, 4), [], [5] * 3000)
    found = Counter((first, second) for first, second in children.token.tolist())
    exact = {(a, b): float(law[a] * law[b] / (1 - law[a])) for a, b in permutations(range(4), 2)}
    assert agreement(found, exact) > 1e-3


def test_every_row_is_drawn_apart_and_a_seed_draws_the_same_again() -> None:
    logits = torch.zeros(6, 50)
    drawn = [
        DrawingScorer(_processor(50), seed, Calibration()).children(logits, [], [9] * 6).token.tolist()
        for seed in (3, 3, 4)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len({tuple(row) for row in drawn[0]}) == 6
    scorer = DrawingScorer(_processor(50), 3, Calibration())
    halves = [scorer.children(logits[:3], [], [9] * 3).token.tolist() for _ in range(2)]
    assert halves[0] + halves[1] == drawn[0], "how many rows come together changes nothing"


def test_children_carry_what_they_were_drawn_from() -> None:
    """Penalties and temperature, no filters; of a row that is no numbers, nothing is offered."""
    params = SamplingParams(temperature=0.5, top_k=1, repetition_penalty=1.3)
    processor = LogitsProcessor(params, 6, [1])
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    logits[1, 2] = torch.nan
    paths = [[2], [], [3, 4]]
    found = DrawingScorer(processor, 1, Calibration(), 6).children(logits, paths, [4, 4, 4], [1, 0, 2])
    assert found.drawn is not None and found.drawn.shape == (3, 6)
    for row in (0, 2):
        wide = torch.cat([logits[row], torch.tensor([-torch.inf])])
        wanted = processor.draft_scores(wide[None], [paths[row]])[0]
        assert torch.equal(found.drawn[row], wanted)
        assert np.array_equal(found.x[row], wanted[found.token[row]].numpy())
        assert np.isfinite(found.log_prob[row]).tolist() == [True] * 5 + [False]
    assert not np.isfinite(found.log_prob[1]).any()


def test_a_child_is_as_likely_as_its_rank() -> None:
    calibration = Calibration()
    for _ in range(400):
        calibration.table.observe(1, np.zeros(4, np.float32), 1)
    found = DrawingScorer(_processor(9), 1, calibration, 4).children(torch.zeros(2, 9), [], [3, 3], [0, 1])
    assert np.allclose(np.exp(found.log_prob), calibration.acceptance()[[0, 1], :4], rtol=1e-5)
    assert found.log_prob[1].argmax() == 1


_GENERATOR = torch.Generator().manual_seed(4)
_TARGET, _DRAFT = (1.5 * torch.randn(WORDS, WORDS, generator=_GENERATOR) for _ in range(2))
_LOW = torch.arange(WORDS) < 2
PIPELINES: dict[str, tuple[torch.Tensor, torch.Tensor, dict[str, float]]] = {
    "another": (_TARGET, _DRAFT, {"temperature": 0.8, "min_p": 0.02}),
    "disjoint": (_TARGET.masked_fill(_LOW, -torch.inf), _DRAFT.masked_fill(~_LOW, -torch.inf), {}),
}


@pytest.mark.parametrize("case", PIPELINES.values(), ids=PIPELINES)
def test_what_is_drawn_and_walked_follows_the_target(
    case: tuple[torch.Tensor, torch.Tensor, dict[str, float]],
) -> None:
    """Two next tokens, whichever passes they come from."""
    target, draft, params = case
    processor = _processor(WORDS, **params)
    rows = [processor.distribution(row) for row in target]
    exact = {(a, b): float(rows[0][a] * rows[a][b]) for a in range(WORDS) for b in range(WORDS)}
    found = Counter(_two_tokens(processor, target, draft, seed) for seed in range(SEEDS))
    assert agreement(found, exact) > 1e-3


def _two_tokens(
    processor: LogitsProcessor, target: torch.Tensor, draft: torch.Tensor, seed: int
) -> tuple[int, int]:
    """What passes say after token 0, where a model's logits are the row [V] of the last token."""
    scorer, said = DrawingScorer(processor, seed, Calibration(), 2), [0]
    while len(said) < 3:
        tree, scores = _drawn_tree(scorer, draft, said[-1], len(said) - 1)
        rows = target[tree.token]
        walked = walk_without_replacement(
            tree,
            LikelyRows(tree, rows.__getitem__, 4),
            processor,
            scores.__getitem__,
            lambda position: endless(seed, "test", position),
            len(said) - 1,
            lambda token: False,
        )
        said += walked.tokens
    return said[1], said[2]


def _drawn_tree(
    scorer: DrawingScorer, draft: torch.Tensor, root: int, position: int
) -> tuple[TokenTree, dict[int, torch.Tensor]]:
    """Two levels with two children a node, and the scores that those of each node were drawn from."""
    tokens, parents, scores, level = [root], [-1], dict[int, torch.Tensor](), [0]
    for depth in range(2):
        inner = [tokens[node] for node in level]
        children = scorer.children(draft[inner], [], [position + depth + 1] * len(inner), [depth])
        assert children.drawn is not None
        start = len(tokens)
        for row, node in enumerate(level):
            scores[node] = children.drawn[row]
            possible = children.token[row][np.isfinite(children.log_prob[row])].tolist()
            tokens += possible
            parents += [node] * len(possible)
        level = list(range(start, len(tokens)))
    return TokenTree.build(tokens, parents, [0.0] * len(tokens)), scores
