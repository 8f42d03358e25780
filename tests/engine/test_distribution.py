"""Statistical test of losslessness: sampled tokens follow the target's distribution."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec import SamplingParams
from tests.support.chi_squared import p_value
from tests.support.plan_fixtures import PlanEnvironment
from tests.support.tiny_models import disturb, write_model

pytestmark = pytest.mark.usefixtures("drafters_stay")
SHORT, WORDS, SEEDS, EOS = [4, 5, 6], 12, 300, 2
SEQUOIA: dict[str, Any] = {"verify": "sequoia", "tree": "sequoia", "temperature": 1.0}
COUPLED: dict[str, Any] = {"budget": 16, "width": 4}
RULES: dict[str, Any] = {
    "logit_bias": {7: 1.5, 9: -1.0},
    "allowed_token_ids": range(2, WORDS),
    "no_repeat_ngram_size": 2,
    "bad_words": ["w3", "w7 w8", "w7 w9"],
    "min_tokens": 1,
    "stop_token_ids": (10,),
}


def _ruled(logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """Apply RULES to logits [12] that follow these ids, SHORT first."""
    scores = logits.clone()
    scores[7] += 1.5
    scores[9] -= 1.0
    repeated = [token for before, token in pairwise(ids) if before == ids[-1]]
    scores[[0, 1, 3, *repeated, *([8, 9] if ids[-1] == 7 else [])]] = -torch.inf
    if ids == SHORT:
        scores[[EOS, 10]] = -torch.inf
    return scores


def _law(folder: Path, params: SamplingParams, ruled: bool) -> dict[tuple[int, ...], float]:
    """Return the probability of every pair of next tokens, from transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def odds(ids: list[int]) -> torch.Tensor:
        logits = model(torch.tensor([ids])).logits[0, -1].double()
        scores = (_ruled(logits, ids) if ruled else logits) / params.temperature
        least = scores.topk(params.top_k or WORDS).values[-1]
        return scores.masked_fill(scores < least, -torch.inf).softmax(-1)

    with torch.inference_mode():
        first = odds(SHORT)
        second = [odds([*SHORT, token]) for token in range(WORDS)]
    return {(a, b): float(first[a] * second[a][b]) for a in range(WORDS) for b in range(WORDS)}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("verify", "given", "rules"),
    [("coupled", COUPLED, {}), ("sequoia", SEQUOIA, {"top_k": 5, "temperature": 0.8, **RULES})],
    ids=["coupled", "sequoia"],
)
def test_two_tokens(
    verify: str, given: dict[str, Any], rules: dict[str, Any], plan_env: PlanEnvironment, tmp_path: Path
) -> None:
    """Trees of several levels with several draft tokens per node; rules, filter and temperature."""
    target, draft = (
        write_model(tmp_path / name, spread=0.25, vocab_size=WORDS, num_hidden_layers=1)
        for name in ("target", "draft")
    )
    for _ in range(8):
        disturb(draft)  # so that it agrees in part
    passes, counts = 0, Counter[tuple[int, ...]]()
    with plan_env.load(target, draft=str(draft), context=64, learn=False, **given) as engine:
        shape = engine.drafting.policy.shape
        if verify == "sequoia":
            assert shape is not None and shape.depth > 1 and len(shape.children(0)) > 1
        for seed in range(SEEDS):
            asked = {"temperature": 1.0, "ignore_eos": not rules} | rules
            params = SamplingParams(seed=seed, max_tokens=3, **asked)
            result = engine.generate(SHORT, params)
            counts[result.token_ids[:2]] += 1
            passes += result.passes
    assert passes < 2.9 * SEEDS, "some draft tokens were accepted"
    assert p_value(counts, _law(target, params, bool(rules))) > 1e-3
    assert not rules or p_value(counts, _law(target, params, False)) < 1e-6
