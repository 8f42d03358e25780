"""Losslessness as statistics: sampled tokens follow the target's own distribution."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare

from offspec import SamplingParams
from tests.support.products import some
from tests.support.tiny_models import tiny_engine, write_model

PROMPT = [4, 5, 6]


@pytest.mark.exhaustive
@pytest.mark.parametrize("seeds", some([500, 1500], 500))
def test_two_sampled_tokens_follow_the_exact_distribution(seeds: int, tmp_path: Path) -> None:
    target = write_model(tmp_path / "target", spread=0.25, vocab_size=12, num_hidden_layers=1)
    draft = write_model(tmp_path / "draft", vocab_size=12, num_hidden_layers=1, seed=4)
    counts: Counter[tuple[int, ...]] = Counter()
    with tiny_engine(target, draft, budget=16, width=4, resident=(0,)) as engine:
        for seed in range(seeds):
            params = SamplingParams(temperature=1.0, seed=seed, max_tokens=2, ignore_eos=True)
            counts[engine.generate(PROMPT, params).token_ids] += 1
    exact = _pairs(target)
    expected = {pair: probability * seeds for pair, probability in exact.items()}
    common = [pair for pair, count in expected.items() if count >= 5]
    observed = [counts[pair] for pair in common] + [seeds - sum(counts[pair] for pair in common)]
    wanted = [expected[pair] for pair in common] + [seeds - sum(expected[pair] for pair in common)]
    assert len(common) > 10
    assert chisquare(observed, wanted).pvalue > 1e-3


def _pairs(folder: Path) -> dict[tuple[int, ...], float]:
    """The probability of every pair of next tokens, from transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        first = model(torch.tensor([PROMPT])).logits[0, -1].double().softmax(-1)
        rows = torch.tensor([[*PROMPT, token] for token in range(12)])
        second = model(rows).logits[:, -1].double().softmax(-1)
    return {(a, b): float(first[a] * second[a, b]) for a in range(12) for b in range(12)}
