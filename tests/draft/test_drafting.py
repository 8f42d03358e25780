"""Scoring and tree growth: equal to naive versions, in reused buffers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offspec.core.config import EngineConfig, SamplingParams
from offspec.core.errors import RequestError
from offspec.draft.base import Children, ScoreBuffer, Scorer
from offspec.draft.growing_tree import GrowingTree
from offspec.sampling.logits_processor import LogitsProcessor
from offspec.sampling.noise import GumbelNoise
from offspec_planners.acceptance import Calibration, TemperatureFit

_HISTORY = [1, 5, 5, 9]
_PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.4}


def _reference_children(
    logits: torch.Tensor,
    paths: list[list[int]],
    positions: list[int],
    processor: LogitsProcessor,
    noise: GumbelNoise | None,
    tau: float,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [W, K] and x relative to the best, sorted, in float64."""
    size = processor.vocab_size
    wide = torch.full((len(logits), size), -torch.inf)
    known = min(size, logits.shape[1])
    wide[:, :known] = logits[:, :known].float()
    rows = [processor.draft_scores(row[None], [path])[0] for row, path in zip(wide, paths, strict=True)]
    x = torch.stack(rows).double()
    if noise is not None:
        x = x + torch.stack([noise.row(position) for position in positions])
    top = x.topk(count, dim=1).values
    return top / tau - (x / tau).logsumexp(1, keepdim=True), top - top[:, :1]


@settings(deadline=None, max_examples=40)
@given(
    size=st.sampled_from([7, 127, 3000, 9001]),
    padding=st.sampled_from([-3, 0, 5]),
    count=st.integers(1, 5),
    temperature=st.sampled_from([0.0, 0.6, 1.0]),
    tau=st.sampled_from([0.7, 1.0, 1.9]),
    penalized=st.booleans(),
    one_depth=st.booleans(),
)
def test_children_are_the_most_likely(
    size: int, padding: int, count: int, temperature: float, tau: float, penalized: bool, one_depth: bool
) -> None:
    """Any vocabulary, and heads padded to other sizes; a second call reuses the buffer of the first."""
    params = SamplingParams(temperature=temperature, seed=3, **(_PENALTIES if penalized else {}))
    processor = LogitsProcessor(params, size, [token % size for token in _HISTORY])
    noise = GumbelNoise(5, size) if temperature else None
    scorer = Scorer(processor, noise, Calibration(TemperatureFit(tau)), children=32)
    generator = torch.Generator().manual_seed(size + count)
    assert scorer.needs_paths == penalized
    for rows in (count, count + 2, 1):
        logits = (4 * torch.randn(rows, size + padding, generator=generator)).to(torch.bfloat16)
        before = logits.clone()
        paths = [[3, row % 3, 3] for row in range(rows)]
        positions = [40 if one_depth else 40 + row % 3 for row in range(rows)]
        found = scorer.children(logits, paths if penalized else [], positions)
        scorer._room._memory.fill_(torch.nan)
        best = min(32, size)
        log_prob, x = _reference_children(logits, paths, positions, processor, noise, tau, best)
        assert found.token.shape == (rows, best) and torch.equal(logits, before)
        usable = torch.isfinite(x).numpy()
        np.testing.assert_allclose(found.log_prob[usable], log_prob.numpy()[usable], atol=2e-5)
        np.testing.assert_allclose(found.x[usable], x.numpy()[usable], atol=2e-5)
        assert all(len(set(row)) == best for row in found.token.tolist()), "children are distinct"
        if padding < 0:
            assert not usable.all() or found.token.max() < size + padding


def test_shared_buffer_gives_the_same_scores() -> None:
    room, found = ScoreBuffer(), list[list[Children]]()
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(2))
    for shared in (room, None):
        scorers = list[Scorer]()
        for i, noise in enumerate((GumbelNoise(5, 700), None)):
            processor = LogitsProcessor(SamplingParams(temperature=1.0, seed=i), 700 - i, [])
            scorers.append(Scorer(processor, noise, Calibration(), buffer=shared))
        found.append([scorer.children(logits[i:], [], [9 + i] * (3 - i)) for i, scorer in enumerate(scorers)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one.token, other.token)
        np.testing.assert_array_equal(one.log_prob, other.log_prob)
    assert len(room._memory) >= 3 * 700, "it was used"


def test_ties_are_broken_by_the_lowest_token() -> None:
    scorer = Scorer(LogitsProcessor(SamplingParams(), 20_000, []), None, Calibration())
    # Distinct logits, so that the order is unique; most of the best share one block.
    logits = torch.linspace(0, 8, 20_000)[torch.randperm(20_000, generator=torch.Generator().manual_seed(1))]
    logits[4000:4020] += 8
    found = scorer.children(logits[None], [], [9])
    assert found.token[0].tolist() == logits.topk(32).indices.tolist()
    # bfloat16 has few values, so a draft's logits tie; the selection among ties must be deterministic.
    found = scorer.children(torch.arange(20_000).remainder(5).to(torch.bfloat16)[None], [], [9])
    assert found.token[0].tolist() == list(range(4, 160, 5)), "the first 32 of the largest"


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.integers(1, 40))
def test_children_below_the_tree_limit_are_dropped(seed: int, budget: int) -> None:
    """The best nodes stay the same if nodes at or below the worst of a full tree are left out."""
    random = np.random.default_rng(seed)
    every, some = GrowingTree(7), GrowingTree(7)
    open_of: list[list[int]] = [[0], [0]]
    for _ in range(4):
        tokens = np.tile(np.arange(6), (len(open_of[0]), 1))
        # Few values, so that there are ties.
        log_probs = -random.integers(0, 4, tokens.shape).astype(np.float64)
        best = some.best(budget)
        floor = float(some.score[best].min()) if len(best) == budget else -np.inf
        every.extend(np.array(open_of[0]), tokens, log_probs)
        some.extend(np.array(open_of[1]), tokens, log_probs, floor)
        trees = [candidates.tree(candidates.best(budget)) for candidates in (every, some)]
        trees[1].check()
        for name in ("token", "parent", "depth", "score"):
            assert np.array_equal(getattr(trees[0], name), getattr(trees[1], name))
        every.expanded_by[0, open_of[0]] = some.expanded_by[0, open_of[1]] = True
        fresh = np.flatnonzero(~some.expanded_by[0, some.best(budget)])[:3]
        if not len(fresh):
            break
        open_of = [candidates.best(budget)[fresh].tolist() for candidates in (every, some)]


def test_width_can_be_measured() -> None:
    assert EngineConfig("m").width is None
    with pytest.raises(RequestError, match="width"):
        EngineConfig("m", width=0)
