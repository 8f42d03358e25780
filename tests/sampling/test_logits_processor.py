"""Logits processing: equal to transformers, at every node with the node's own history."""

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from offspec.core.config import SamplingParams
from offspec.core.errors import CheckpointError
from offspec.sampling.filters import cutoff, cutoffs
from offspec.sampling.logits_processor import LogitsProcessor
from offspec.sampling.noise import GumbelNoise
from offspec_kernels.gumbel_argmax import mask_below
from tests.support.kernel_device import kernel_device

V = 300
ALL = {
    "temperature": 0.7,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.02,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.2,
}
SOME = [
    {"temperature": 1.7, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 0.999},
    {"temperature": 0.8, "min_p": 0.1},
    {"temperature": 1.2, "top_k": 30, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 1, "top_p": 0.01, "min_p": 1.0},
    {"temperature": 0.9, "top_k": 100_000, "top_p": 0.95},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 0.8},
]
PENALTIES = [
    {"presence_penalty": 0.7},
    {"frequency_penalty": 0.3},
    {"presence_penalty": -0.7, "frequency_penalty": -0.3},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1},
]
tokens = st.lists(st.integers(0, V - 1), max_size=12)


def processor(prompt: list[int] | None = None, size: int = V, **params: Any) -> LogitsProcessor:
    return LogitsProcessor(SamplingParams(**params), size, prompt or [])


def row(seed: int, size: int = V, spread: float = 3.0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread


def given_noise(row: Tensor) -> Any:
    """Noise with this row at every position."""
    return SimpleNamespace(key=0, row=lambda position: row, table=lambda positions: None)


def transformers_row(logits: Tensor, history: list[int], params: SamplingParams) -> Tensor:
    chain = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature > 0:
        chain.append(TemperatureLogitsWarper(params.temperature))
        if params.top_k:
            chain.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1.0:
            chain.append(TopPLogitsWarper(params.top_p))
        if params.min_p > 0.0:
            chain.append(MinPLogitsWarper(params.min_p))
    result = chain(torch.tensor([history]), logits[None].clone())
    assert isinstance(result, Tensor)
    return result[0]


def penalized_naively(logits: Tensor, prompt: list[int], output: list[int], params: SamplingParams) -> Tensor:
    counts = Counter(output)
    scores = [float(x) for x in logits]
    for token in {*prompt, *output}:
        penalty = params.repetition_penalty
        scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
        scores[token] -= params.frequency_penalty * counts[token]
        scores[token] -= params.presence_penalty if counts[token] else 0.0
    return torch.tensor(scores) / (params.temperature or 1.0)


@pytest.mark.parametrize("params", SOME)
def test_process_equals_transformers(params: dict[str, Any]) -> None:
    for seed in range(8):
        logits = row(seed, spread=(0.3, 3.0)[seed % 2])
        history = row(seed + 99).topk(9).indices.tolist()
        ours = processor(history[:4], **params)
        ours.commit(history[4:6])
        expected = transformers_row(logits, history, SamplingParams(**params))
        assert torch.equal(ours.process(logits, history[6:]), expected)


@pytest.mark.parametrize(("top_p", "spread"), [(0.3, 3.0), (0.9, 3.0), (0.999, 0.05)])
def test_top_p_equals_transformers_on_a_large_vocabulary(top_p: float, spread: float) -> None:
    """Whether the first few hundred tokens suffice, or the first thousands, or everything is sorted."""
    logits = row(1, size=20_000, spread=spread)
    ours = processor(size=20_000, temperature=1.0, top_p=top_p).process(logits)
    kept = transformers_row(logits.double(), [0], SamplingParams(temperature=1.0, top_p=top_p)).isfinite()
    assert torch.equal(ours.isfinite(), kept)


@settings(max_examples=60, deadline=None)
@given(params=st.sampled_from(PENALTIES), prompt=tokens, output=tokens, path=tokens, seed=st.integers(0, 99))
def test_penalties_equal_a_scalar_loop(
    params: dict[str, float], prompt: list[int], output: list[int], path: list[int], seed: int
) -> None:
    """After every commit; a path counts as if it were committed."""
    ours, known, whole = processor(prompt, **params), list[int](), [*output, *path]
    for tokens in (output[:3], output[3:], path):
        result = ours.process(row(seed), whole[len(known) :])
        expected = penalized_naively(row(seed), prompt, whole, SamplingParams(**params))
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
        ours.commit(tokens)
        known += tokens
        assert torch.equal(ours.process(row(seed), whole[len(known) :]), result)


def test_input_is_not_modified() -> None:
    for params in ({}, {"temperature": 1.0}, {"temperature": 0.7}, PENALTIES[3], ALL):
        for dtype in (torch.float32, torch.bfloat16):
            logits = torch.stack([row(0), row(1)]).to(dtype)
            before = logits.clone()
            ours = processor([1, 5], **params)
            processed = ours.process(logits[0], [9, 9])
            drafted = ours.draft_scores(logits, [[9], [1, 2]])
            assert processed.dtype == drafted.dtype == torch.float32
            ours.choose(logits[0], [9, 9], GumbelNoise(1, V) if ours.uses_noise else None, 3)
            assert torch.equal(logits, before)


def test_ties_are_broken_deterministically() -> None:
    flat = torch.zeros(10)
    flat[[2, 7]] = 1.0
    likelier = math.e / (2 * math.e + 8)

    def kept(scores: Tensor = flat, **params: Any) -> list[int]:
        found = processor(size=len(scores), temperature=1.0, **params).process(scores)
        return found.isfinite().nonzero()[:, 0].tolist()

    assert kept(top_p=likelier - 1e-3) == [2]  # the lower id of two equals
    assert kept(top_p=likelier + 1e-3) == [2, 7]
    assert kept(top_p=2.5 * likelier) == [0, 1, 2, 7]
    assert kept(top_k=1) == [2, 7]  # top_k keeps equals, as transformers does
    assert kept(top_k=3) == list(range(10))
    assert kept(min_p=1.0) == [2, 7]
    assert kept(torch.zeros(4), top_p=0.5) == [0, 1], "two of four quarters are a half, exactly"


def test_unreachable_top_p_keeps_all_tokens() -> None:
    for seed in range(20):
        scores = row(seed, size=500, spread=0.01)
        found = processor(size=500, temperature=1.0, top_p=math.nextafter(1.0, 0.0)).process(scores)
        assert torch.equal(found[found.isfinite()], scores[found.isfinite()])
        assert found.isfinite().sum() >= 499


def test_extreme_temperatures() -> None:
    noise = GumbelNoise(3, V)
    for seed, temperature in enumerate([1e-3, 1e-12, 1e-40] * 3):
        ours = processor(temperature=temperature, top_p=0.9)
        assert ours.choose(row(seed), [], noise, seed)[0] == row(seed).argmax()
    token, _ = processor(temperature=1e300).choose(torch.arange(float(V)), [], noise, 7)
    assert token == int(noise.row(7).argmax()), "beyond float32 all tokens are as likely"


def test_greedy_ignores_noise_and_filters() -> None:
    assert not processor(top_k=1).uses_noise and processor(temperature=0.1).uses_noise
    assert torch.equal(processor(top_k=1, top_p=0.1, min_p=0.5).process(row(0)), row(0))


def test_ties_choose_the_lowest_id() -> None:
    for size in (9, 1000, 70_000):
        ours = processor(size=size, temperature=1.0)
        scores, noise = torch.zeros(size), torch.zeros(size)
        scores[[size - 1, size // 2, 3]] = 2.0
        assert ours.choose(scores, [], None, 0) == (3, 0.0)
        noise[1] = 2.0
        assert ours.choose(scores, [], given_noise(noise), 0) == (1, 0.0)
    assert processor(size=2).choose(torch.tensor([-math.inf, 3.0]), [], None, 0) == (1, math.inf)
    assert processor(size=1).choose(torch.tensor([3.0]), [], None, 0) == (0, math.inf)


@pytest.mark.parametrize("params", [{"temperature": 0.6}, *SOME, PENALTIES[3], ALL])
def test_choice_maximizes_processed_logits_plus_noise(params: dict[str, Any]) -> None:
    """The lead over the second token is returned too."""
    ours, noise = processor([3, 4], **params), GumbelNoise(5, V)
    ours.commit([4, 9])
    for seed in range(8):
        dtype = (torch.float32, torch.bfloat16)[seed % 2]  # bfloat16 causes ties
        logits = row(seed, spread=0.5 if seed % 4 < 2 else 3.0).to(dtype)
        noisy = ours.process(logits, [seed, 8])
        if ours.uses_noise:
            noisy = noisy + noise.row(seed)
        best, second = noisy.topk(2).values.tolist()
        expected = (int(noisy.argmax()), best - second)
        assert ours.choose(logits, [seed, 8], noise if ours.uses_noise else None, seed) == expected


@pytest.mark.kernels
@pytest.mark.parametrize("params", [{}, ALL])
def test_choice_equals_the_kernels(params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are computed on the device of the kernels in both cases: only the selection differs."""
    device = kernel_device()
    ours = LogitsProcessor(SamplingParams(**params), V, [3, 4], device)
    noise = GumbelNoise(5, V, device) if ours.uses_noise else None
    for seed in range(3):
        given = (row(seed).bfloat16().to(device), [seed], noise, seed)
        monkeypatch.setenv("OFFSPEC_KERNELS", "eager")
        expected = ours.choose(*given)
        monkeypatch.setenv("OFFSPEC_KERNELS", "triton")
        assert ours.choose(*given) == expected


@pytest.mark.parametrize(("params", "bad"), [({}, math.nan), ({}, math.inf), (ALL, math.nan)])
def test_non_finite_logits_are_refused(params: dict[str, float], bad: float) -> None:
    logits, ours = row(0), processor(**params)
    logits[5] = bad
    with pytest.raises(CheckpointError, match="not finite") as caught:
        ours.choose(logits, [], GumbelNoise(0, V) if ours.uses_noise else None, 0)
    assert "\n" not in str(caught.value)


FILTERS: list[dict[str, Any]] = [
    {"top_p": 0.5},
    {"top_p": 0.9999999999},
    {"top_k": 7},
    {"top_k": 7, "top_p": 0.6},
    {"min_p": 0.1},
    {"top_k": 300, "top_p": 0.8, "min_p": 0.02},
]


def rows(count: int, ties: bool) -> torch.Tensor:
    """[n, 700] float32, some tokens impossible."""
    scores = 2 * torch.randn(count, 700, generator=torch.Generator().manual_seed(count))
    if ties:
        scores = scores.round()
    scores[:, ::5] = -torch.inf
    return scores


@pytest.mark.parametrize("filters", FILTERS)
def test_batched_filters_equal_single_rows(filters: dict[str, Any], device: torch.device) -> None:
    params = SamplingParams(temperature=1.0, **filters)
    for count, ties in ((2, True), (4, False), (9, True)):
        scores = rows(count, ties)
        least, last_tie = cutoffs(scores.to(device), params)
        assert last_tie is not None
        for row, *cut in zip(scores, least.cpu(), last_tie.cpu(), strict=True):
            expected = mask_below(row.clone(), *cutoff(row, params))
            assert torch.equal(mask_below(row.clone(), *cut), expected)
            assert expected.isfinite().any()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7, "seed": 1},
        {"temperature": 0.7, "seed": 1, "top_p": 0.8, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    ],
)
def test_batched_choices_equal_single_choices(params: dict[str, Any], device: torch.device) -> None:
    ours = LogitsProcessor(SamplingParams(**params), 700, [3, 4, 3], device)
    noise = GumbelNoise(5, 700, device) if ours.uses_noise else None
    logits, paths = rows(6, False).to(device), [[], [3], [3, 4], [3], [9], [9, 3]]
    positions = [11 + len(path) for path in paths]
    together = ours.choices(logits, paths, noise, positions)
    for choice, row, path, position in zip(together, logits, paths, positions, strict=True):
        assert ours.checked_pick(choice, row) == ours.choose(row, path, noise, position)
