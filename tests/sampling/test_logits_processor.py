"""Logits processing: as transformers does it, at every node with the node's own history."""

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
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
from offspec.sampling.logits_processor import LogitsProcessor
from offspec.sampling.noise import GumbelNoise
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
    {"temperature": 0.6},
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
quick = settings(max_examples=30, deadline=None)
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


def penalised_naively(logits: Tensor, prompt: list[int], output: list[int], params: SamplingParams) -> Tensor:
    counts = Counter(output)
    scores = [float(x) for x in logits]
    for token in {*prompt, *output}:
        penalty = params.repetition_penalty
        scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
        scores[token] -= params.frequency_penalty * counts[token]
        scores[token] -= params.presence_penalty if counts[token] else 0.0
    return torch.tensor(scores) / (params.temperature or 1.0)


@pytest.mark.parametrize("params", SOME)
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_process_equals_transformers(params: dict[str, Any], spread: float) -> None:
    for seed in range(10):
        logits, history = row(seed, spread=spread), row(seed + 99).topk(9).indices.tolist()
        ours = processor(history[:4], **params)
        ours.commit(history[4:6])
        expected = transformers_row(logits, history, SamplingParams(**params))
        assert torch.equal(ours.process(logits, history[6:]), expected)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.05, 1.0, 3.0])
def test_top_p_equals_transformers_on_a_large_vocabulary(top_p: float, spread: float) -> None:
    """Both where the first few hundred tokens hold enough, and where everything must be sorted."""
    logits = row(1, size=20_000, spread=spread)
    ours = processor(size=20_000, temperature=1.0, top_p=top_p).process(logits)
    kept = transformers_row(logits.double(), [0], SamplingParams(temperature=1.0, top_p=top_p)).isfinite()
    assert torch.equal(ours.isfinite(), kept)


@pytest.mark.parametrize("params", PENALTIES)
@quick
@given(prompt=tokens, output=tokens, path=tokens, seed=st.integers(0, 99))
def test_penalties_equal_a_scalar_loop(
    params: dict[str, float], prompt: list[int], output: list[int], path: list[int], seed: int
) -> None:
    ours = processor(prompt, **params)
    ours.commit(output)
    expected = penalised_naively(row(seed), prompt, output + path, SamplingParams(**params))
    torch.testing.assert_close(ours.process(row(seed), path), expected, rtol=1e-5, atol=1e-6)


@quick
@given(prompt=tokens, output=tokens, path=tokens, seed=st.integers(0, 99))
def test_a_path_counts_as_if_it_were_committed(
    prompt: list[int], output: list[int], path: list[int], seed: int
) -> None:
    logits, whole = row(seed), output + path
    results = []
    for cut in (0, len(output), len(whole)):
        ours = processor(prompt, **ALL)
        ours.commit(whole[: cut // 2])
        ours.commit(whole[cut // 2 : cut])
        results.append(ours.process(logits, whole[cut:]))
    assert torch.equal(results[0], results[1]) and torch.equal(results[1], results[2])


def test_a_commit_counts_from_the_next_row_on() -> None:
    ours, output = processor([1], **PENALTIES[3]), [5, 5, 1, 7]
    for done in range(4):
        expected = penalised_naively(row(0), [1], output[:done], SamplingParams(**PENALTIES[3]))
        torch.testing.assert_close(ours.process(row(0)), expected)
        ours.commit(output[done : done + 1])


def test_commit_without_penalties_changes_nothing() -> None:
    ours = processor([1, 2], temperature=0.5, top_p=0.9)
    before = ours.process(row(0), [3])
    ours.commit([3, 4])
    assert torch.equal(ours.process(row(0), []), before)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 0.7}, PENALTIES[3], ALL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_input_is_left_alone(params: dict[str, float], dtype: torch.dtype) -> None:
    logits = torch.stack([row(0), row(1)]).to(dtype)
    before = logits.clone()
    ours = processor([1, 5], **params)
    ours.commit([7])
    processed = ours.process(logits[0], [9, 9])
    drafted = ours.draft_scores(logits, [[9], [1, 2]])
    assert processed.dtype == drafted.dtype == torch.float32
    ours.choose(logits[0], [9, 9], None, 3)
    ours.choose(logits[0], [9, 9], GumbelNoise(1, V), 3)
    assert torch.equal(logits, before)


@quick
@given(
    paths=st.lists(tokens, min_size=1, max_size=6),
    params=st.sampled_from([*PENALTIES, ALL, {"temperature": 0.7}, {"temperature": 0.7, **PENALTIES[3]}]),
)
def test_draft_scores_are_the_rows_without_filters(paths: list[list[int]], params: dict[str, Any]) -> None:
    logits = torch.stack([row(seed) for seed in range(len(paths))]).bfloat16()
    unfiltered = {**params, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    ours, alone = processor([3, 4], **params), processor([3, 4], **unfiltered)
    ours.commit([4, 5])
    alone.commit([4, 5])
    expected = torch.stack([alone.process(x, path) for x, path in zip(logits, paths, strict=True)])
    assert torch.equal(ours.draft_scores(logits, paths), expected)


def test_ties_are_cut_the_same_way_every_time() -> None:
    flat = torch.zeros(10)
    flat[[2, 7]] = 1.0
    likelier = math.e / (2 * math.e + 8)

    def kept(**params: Any) -> list[int]:
        scores = processor(size=10, temperature=1.0, **params).process(flat)
        return scores.isfinite().nonzero()[:, 0].tolist()

    assert kept(top_p=likelier - 1e-3) == [2]  # the lower id of two equals
    assert kept(top_p=likelier + 1e-3) == [2, 7]
    assert kept(top_p=2.5 * likelier) == [0, 1, 2, 7]
    assert kept(top_k=1) == [2, 7]  # top_k keeps equals, as transformers does
    assert kept(top_k=3) == list(range(10))
    assert kept(min_p=1.0) == [2, 7]


def test_a_sum_that_is_just_top_p_is_enough() -> None:
    """Four tokens of a quarter each, exactly: two of them are a half."""
    found = processor(size=4, temperature=1.0, top_p=0.5).process(torch.zeros(4))
    assert found.isfinite().nonzero()[:, 0].tolist() == [0, 1]


def test_a_top_p_that_rounding_cannot_reach_keeps_all() -> None:
    for seed in range(20):
        ours = processor(size=500, temperature=1.0, top_p=math.nextafter(1.0, 0.0))
        spread = ours.process(row(seed, size=500, spread=0.01))
        assert torch.equal(spread[spread.isfinite()], row(seed, size=500, spread=0.01)[spread.isfinite()])
        assert spread.isfinite().sum() >= 499


def test_the_likeliest_token_is_always_kept() -> None:
    for seed in range(20):
        ours = processor(temperature=1.0, top_k=1, top_p=1e-9, min_p=1.0)
        assert ours.process(row(seed)).isfinite().nonzero().item() == row(seed).argmax()


@pytest.mark.parametrize("temperature", [1e-3, 1e-12, 1e-40])
def test_a_very_low_temperature_is_greedy(temperature: float) -> None:
    for seed in range(20):
        ours = processor(temperature=temperature, top_p=0.9)
        assert ours.choose(row(seed), [], GumbelNoise(1, V), seed)[0] == row(seed).argmax()


def test_greedy_uses_no_noise_and_no_filter() -> None:
    assert not processor(top_k=1).uses_noise
    assert processor(temperature=0.1).uses_noise
    assert torch.equal(processor(top_k=1, top_p=0.1, min_p=0.5).process(row(0)), row(0))


def test_the_choice_is_the_lowest_id_among_equals() -> None:
    for size in (9, 1000, 70_000):
        ours = processor(size=size, temperature=1.0)
        scores = torch.zeros(size)
        scores[[size - 1, size // 2, 3]] = 2.0
        assert ours.choose(scores, [], None, 0) == (3, 0.0)
        noise = torch.zeros(size)
        noise[1] = 2.0
        assert ours.choose(scores, [], given_noise(noise), 0) == (1, 0.0)


def test_the_choice_comes_with_its_lead() -> None:
    def choose(scores: list[float], noise: list[float] | None = None) -> tuple[int, float]:
        row = None if noise is None else given_noise(torch.tensor(noise))
        return processor(size=len(scores), temperature=1.0).choose(torch.tensor(scores), [], row, 0)

    assert choose([0.0, 1.0, 0.5], [0.25, 0.5, 0.25]) == (1, 0.75)
    assert choose([-math.inf, 3.0]) == (1, math.inf)
    assert choose([3.0]) == (0, math.inf)


@pytest.mark.parametrize("params", [*SOME, *PENALTIES, ALL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_choice_is_the_largest_of_the_processed_row_and_the_noise(
    params: dict[str, Any], dtype: torch.dtype
) -> None:
    ours, noise = processor([3, 4], **params), GumbelNoise(5, V)
    ours.commit([4, 9])
    for seed in range(20):
        logits = row(seed, spread=0.5 if seed % 2 else 3.0).to(dtype)  # bfloat16 brings ties
        noisy = ours.process(logits, [seed, 8])
        if ours.uses_noise:
            noisy = noisy + noise.row(seed)
        best, second = noisy.topk(2).values.tolist()
        expected = (int(noisy.argmax()), best - second)
        assert ours.choose(logits, [seed, 8], noise if ours.uses_noise else None, seed) == expected


@pytest.mark.kernels
@pytest.mark.parametrize("params", [{}, {"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.5}, ALL])
def test_the_choice_is_the_kernels_choice(params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are made on the device of the kernels in both cases: only what chooses differs."""
    device = kernel_device()
    ours = LogitsProcessor(SamplingParams(**params), V, [3, 4], device)
    noise = GumbelNoise(5, V, device) if ours.uses_noise else None
    for seed in range(5):
        given = (row(seed).bfloat16().to(device), [seed], noise, seed)
        monkeypatch.setenv("OFFSPEC_KERNELS", "eager")
        expected = ours.choose(*given)
        monkeypatch.setenv("OFFSPEC_KERNELS", "triton")
        assert ours.choose(*given) == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [{}, ALL])
def test_logits_that_are_no_numbers_are_refused(bad: float, params: dict[str, float]) -> None:
    logits = row(0)
    logits[5] = bad
    ours = processor(**params)
    with pytest.raises(CheckpointError, match="not finite") as caught:
        ours.choose(logits, [], GumbelNoise(0, V) if ours.uses_noise else None, 0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({"temperature": 1.0}, marks=pytest.mark.exhaustive),
        pytest.param({"temperature": 0.6, "top_k": 9, "top_p": 0.9}, marks=pytest.mark.exhaustive),
        {"temperature": 1.3, "min_p": 0.05, "repetition_penalty": 1.4, "presence_penalty": 0.5},
    ],
)
def test_picks_follow_the_filtered_distribution(params: dict[str, float]) -> None:
    size, draws = 12, 4000
    ours = processor([1, 2], size=size, **params)
    logits = row(3, size=size, spread=1.0)
    exact = ours.process(logits, [2, 3]).double().softmax(0)
    noises = [GumbelNoise(seed, size) for seed in range(8)]
    counts = torch.zeros(size)
    for draw in range(draws):
        counts[ours.choose(logits, [2, 3], noises[draw % 8], draw)[0]] += 1
    kept = exact > 0
    assert counts[~kept].sum() == 0
    assert stats.chisquare(counts[kept].double(), exact[kept] * draws).pvalue > 0.01


def test_a_temperature_beyond_float32_is_a_very_high_one() -> None:
    processor = LogitsProcessor(SamplingParams(temperature=1e300, seed=3), 50, [])
    noise = GumbelNoise(3, 50)
    token, _ = processor.choose(torch.arange(50.0), [], noise, 7)
    assert token == int(noise.row(7).argmax())
