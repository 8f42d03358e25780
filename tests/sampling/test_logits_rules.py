"""Rules of a request: as transformers applies them, at every node with the node's own history."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from offspec.core.config import SamplingParams
from offspec.core.errors import CheckpointError, RequestError
from offspec.draft.base import Scorer
from offspec.sampling.logits_processor import LogitsProcessor
from offspec_planners.acceptance import Calibration

V, END = 12, 3  # few tokens, so that sequences repeat
tokens = st.lists(st.integers(0, V - 1), max_size=12)
quick = settings(max_examples=40, deadline=None)


def scores(seed: int = 0) -> Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(seed)) * 3


def processor(prompt: list[int], bad: list[list[int]] | None = None, **params: Any) -> LogitsProcessor:
    return LogitsProcessor(SamplingParams(**params), V, prompt, ends={END}, bad_words=bad or ())


@given(prompt=tokens, output=tokens, path=tokens, size=st.integers(1, 4))
@quick
def test_no_repeat_ngram(prompt: list[int], output: list[int], path: list[int], size: int) -> None:
    ours = processor(prompt, no_repeat_ngram_size=size)
    ours.commit(output)
    every = torch.tensor([[*prompt, *output, *path]], dtype=torch.int64)
    theirs = NoRepeatNGramLogitsProcessor(size)(every, scores()[None])[0] if every.numel() else scores()
    assert ours.process(scores(), path).equal(theirs)


@given(
    prompt=tokens,
    output=tokens,
    path=tokens,
    bad=st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=3), min_size=1, max_size=4),
)
@quick
def test_bad_words_are_not_completed(
    prompt: list[int], output: list[int], path: list[int], bad: list[list[int]]
) -> None:
    ours = processor(prompt, bad=bad)
    ours.commit(output)
    # transformers needs a sequence shorter than the text, and then adds -inf to it.
    every = torch.tensor([[0] * 5 + [*prompt, *output, *path]], dtype=torch.int64)
    theirs = NoBadWordsLogitsProcessor(bad)(every, scores()[None])[0]
    assert ours.process(scores(), path).equal(theirs)


@given(output=tokens, path=tokens, least=st.integers(0, 20))
@quick
def test_min_tokens(output: list[int], path: list[int], least: int) -> None:
    ours = processor([1, 2], min_tokens=least, stop_token_ids=(7,))
    ours.commit(output)
    every = torch.tensor([[1, 2, *output, *path]], dtype=torch.int64)
    theirs = MinNewTokensLengthLogitsProcessor(2, least, [END, 7])(every, scores()[None])[0]
    assert ours.process(scores(), path).equal(theirs)


def test_bias_comes_before_penalties() -> None:
    bias = {2: 3.5, 5: -8.0, 9: 0.25}
    ours = processor([2, 4], logit_bias=bias, repetition_penalty=1.4)
    theirs = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor({(token,): by for token, by in bias.items()}),
            RepetitionPenaltyLogitsProcessor(1.4),
        ]
    )
    every = torch.tensor([[2, 4]])
    assert torch.allclose(ours.process(scores()), theirs(every, scores()[None])[0])
    pairs = processor([2, 4], logit_bias=[(9, 0.25), (2, 3.5), (5, -8)], repetition_penalty=1.4)
    assert pairs.process(scores()).equal(ours.process(scores()))


def test_allowed_token_ids() -> None:
    found = processor([], allowed_token_ids=[2, 9, 10]).process(scores())
    assert found.isfinite().nonzero()[:, 0].tolist() == [2, 9, 10]
    assert found[[2, 9, 10]].equal(scores()[[2, 9, 10]])


def test_rules_combine_and_rows_are_independent() -> None:
    """A node gives the same result in a batch as alone."""
    rules: dict[str, Any] = {
        "logit_bias": {1: 2.0},
        "min_tokens": 6,
        "no_repeat_ngram_size": 2,
        "allowed_token_ids": range(9),
        "frequency_penalty": 0.3,
        "temperature": 0.8,
    }
    ours = processor([5, 6, 7, 5], bad=[[6, 1], [8]], **rules)
    ours.commit([6, 2])
    paths = [[], [1, 2], [6], [2, 3, 2, 3], [0] * 9]
    logits = torch.stack([scores(seed) for seed in range(len(paths))])
    together = ours.draft_scores(logits, paths)
    for row, path in enumerate(paths):
        assert ours.draft_scores(logits[row : row + 1], [path])[0].equal(together[row])
    assert together[0, END] == together[2, 1] == -math.inf < together[4, END]
    assert (together[:, 9:] == -math.inf).all() and (together[:, 8] == -math.inf).all()


def test_unknown_tokens_and_values_out_of_range() -> None:
    missing: tuple[tuple[dict[str, Any], str], ...] = (
        ({"logit_bias": {V: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids"),
        ({"stop_token_ids": (99,)}, "stop_token_ids"),
    )
    for params, named in missing:
        with pytest.raises(RequestError, match=f"{named}: invalid token id .* from 0 to {V - 1}"):
            processor([], **params)
    wrong: tuple[dict[str, Any], ...] = (
        {"min_tokens": -1},
        {"min_tokens": 9, "max_tokens": 8},
        {"logit_bias": {1: math.inf}},
        {"allowed_token_ids": ()},
        {"bad_words": ("",)},
        {"no_repeat_ngram_size": -1},
        {"logprobs": -1},
    )
    for params in wrong:
        with pytest.raises(RequestError, match=next(iter(params))):
            SamplingParams(**params)


def test_rules_that_leave_no_token_are_reported() -> None:
    nothing = processor([], allowed_token_ids=(END,), min_tokens=1)
    with pytest.raises(RequestError, match="no token is allowed here"):
        nothing.choose(scores(), [], None, 0)
    with pytest.raises(RequestError, match="no token is allowed here"):
        nothing.distribution(scores(), [])
    assert nothing.choose(scores(), [END], None, 0)[0] == END
    with pytest.raises(CheckpointError):
        nothing.choose(torch.full((V,), math.nan), [], None, 0)
    children = Scorer(nothing, None, Calibration(), children=4).children(
        torch.stack([scores(), scores()]), [[], [END]], [1, 2], [0, 1]
    )
    assert (children.log_prob[0] == -math.inf).all(), "a draft has no token either"
    assert children.token[1, 0] == END and children.log_prob[1, 0] > -math.inf


def test_logprobs_are_unprocessed() -> None:
    ours = processor([1, 1], logprobs=3, temperature=0.3, repetition_penalty=2.0, allowed_token_ids=(1, 2))
    (found, other) = ours.logprobs([scores().bfloat16(), scores()], [2, 1])
    expected = torch.log_softmax(scores().bfloat16().float(), 0)
    assert (found.token, found.logprob, other.token) == (2, float(expected[2]), 1)
    assert [token for token, _ in found.top] == expected.topk(3).indices.tolist()
    assert processor([]).logprobs([scores()], [2]) == ()
    (every,) = processor([], logprobs=50).logprobs([scores()], [2])
    assert len(every.top) == V
