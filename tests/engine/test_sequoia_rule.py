"""Engines that verify by Sequoia's rule: samples follow the target's law, and wrong conditions are told."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec import RequestError, SamplingParams
from offspec.core.config import EngineConfig
from tests.support.chi_squared import agreement
from tests.support.plan_world import PROMPT, World
from tests.support.products import some
from tests.support.tiny_models import disturb, write_model

SEQUOIA: dict[str, Any] = {"verify": "sequoia", "tree": "sequoia", "temperature": 1.0}
SHORT, WORDS, SEEDS, EOS = [4, 5, 6], 12, 300, 2
RULES: dict[str, Any] = {
    "logit_bias": {7: 1.5, 9: -1.0},
    "allowed_token_ids": range(2, WORDS),
    "no_repeat_ngram_size": 2,
    "bad_words": ["w3", "w7 w8", "w7 w9"],
    "min_tokens": 1,
    "stop_token_ids": (10,),
    "ignore_eos": False,
}


def _params(seed: int, tokens: int = 30, **settings: Any) -> SamplingParams:
    given = {"temperature": 1.0, "ignore_eos": True} | settings
    return SamplingParams(seed=seed, max_tokens=tokens, **given)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target of twelve words, and a draft that agrees with it in part."""
    folder = tmp_path_factory.mktemp("small")
    target, draft = (
        write_model(folder / name, spread=0.25, vocab_size=WORDS, num_hidden_layers=1)
        for name in ("target", "draft")
    )
    for _ in range(8):
        disturb(draft)
    return target, draft


def _ruled(logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """What RULES make of logits [12] behind these ids, SHORT first."""
    scores = logits.clone()
    scores[7] += 1.5
    scores[9] -= 1.0
    repeated = [token for before, token in pairwise(ids) if before == ids[-1]]
    scores[[0, 1, 3, *repeated, *([8, 9] if ids[-1] == 7 else [])]] = -torch.inf
    if ids == SHORT:
        scores[[EOS, 10]] = -torch.inf
    return scores


def _law(folder: Path, top_k: int, temperature: float, ruled: bool) -> dict[tuple[int, ...], float]:
    """The probability of every pair of next tokens, from transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def odds(ids: list[int]) -> torch.Tensor:
        logits = model(torch.tensor([ids])).logits[0, -1].double()
        scores = (_ruled(logits, ids) if ruled else logits) / temperature
        least = scores.topk(top_k).values[-1]
        return scores.masked_fill(scores < least, -torch.inf).softmax(-1)

    with torch.inference_mode():
        first = odds(SHORT)
        second = [odds([*SHORT, token]) for token in range(WORDS)]
    return {(a, b): float(first[a] * second[a][b]) for a in range(WORDS) for b in range(WORDS)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("ruled", some([False, True], True))
def test_sampled_tokens_follow_the_target_s_law(world: World, small: tuple[Path, Path], ruled: bool) -> None:
    """With a filter, a temperature, and trees of more than one level and more than one guess a node."""
    target, draft = small
    top_k, temperature, passes = 5, 0.8, 0
    counts: Counter[tuple[int, ...]] = Counter()
    with world.load(target, draft=str(draft), context=64, learn=False, **SEQUOIA) as engine:
        shape = engine.drafting.policy.shape
        assert shape is not None and shape.depth > 1 and len(shape.children(0)) > 1
        for seed in range(SEEDS):
            params = _params(seed, 3, top_k=top_k, temperature=temperature, **(RULES if ruled else {}))
            result = engine.generate(SHORT, params)
            counts[result.token_ids[:2]] += 1
            passes += result.passes
    assert passes < 2.9 * SEEDS, "some guesses were right"
    assert agreement(counts, _law(target, top_k, temperature, ruled)) > 1e-3
    assert not ruled or agreement(counts, _law(target, top_k, temperature, False)) < 1e-6


@pytest.mark.exhaustive
def test_a_seed_says_the_same_again(world: World) -> None:
    said: list[list[tuple[int, ...]]] = []
    for _ in range(2):
        with world.load(learn=False, **SEQUOIA) as engine:
            said.append([engine.generate(PROMPT, _params(seed)).token_ids for seed in range(3)])
    assert said[0] == said[1]
    assert len(set(said[0])) == 3


def test_a_draft_like_the_target_is_always_right(world: World) -> None:
    with world.load(draft=str(world.target), **SEQUOIA) as engine:
        results = [engine.generate(PROMPT, _params(seed)) for seed in range(4)]
        known = engine.drafting.calibration(str(world.target), 1.0, False)
    assert sum(result.passes for result in results) < 4 * 30 / 2
    hits = known.table.hits
    assert hits[:, 0].sum() > 0.9 * hits.sum(), "the first that is drawn is accepted"
    assert known.fit.observations == 0, "what is drawn tells nothing of how scores are to be read"


def test_greedy_answers_are_those_of_every_rule(world: World) -> None:
    with world.load(**SEQUOIA) as engine:
        for rules in ({}, RULES):
            params = _params(1, temperature=0.0, **rules)
            result = engine.generate(PROMPT, params, check=True)
            assert result.mismatches == ()
            alone = engine.generate(PROMPT, params, speculate=False)
            assert result.token_ids == alone.token_ids and result.passes < alone.passes


def test_what_was_drawn_is_kept_apart_from_what_was_ranked(world: World) -> None:
    """Both are learnt without the target's noise, and by rank they hold by other odds."""
    with world.load(**SEQUOIA) as engine:
        engine.generate(PROMPT, _params(1))
    assert len(list((world.cache / "drafts").iterdir())) == 1
    with world.load(verify="plain", tree="sequoia", temperature=1.0) as engine:
        known = engine.drafting.calibration(str(world.near), 1.0, False)
        assert known.passes == 0
        engine.generate(PROMPT, _params(1))
    assert len(list((world.cache / "drafts").iterdir())) == 2


def test_a_comparison_that_cannot_hold_is_refused(world: World) -> None:
    with world.load(**SEQUOIA) as engine:
        for ask in (engine.generate, engine.stream):
            with pytest.raises(RequestError, match=r'`check` .*`verify="coupled"`, or `temperature=0`'):
                ask(PROMPT, _params(1), check=True)
        assert engine.generate(PROMPT, _params(1)).token_ids


@pytest.mark.parametrize("draft", some(["suffix", "lookup,suffix"], "suffix"))
def test_a_request_that_draws_nothing_is_refused(world: World, draft: str) -> None:
    with world.load(**SEQUOIA) as engine:
        with pytest.raises(RequestError, match="takes one draft"):
            engine.generate(PROMPT, _params(1), draft=draft)
        assert engine.generate(PROMPT, _params(1), draft="none").passes == 30


@pytest.mark.parametrize(
    "settings,told",
    [
        ({"tree": "dynamic"}, '`tree="sequoia"`'),
        ({"draft": "suffix"}, "takes one draft"),
        ({"draft": "suffix,substitute"}, "not suffix,substitute"),
        ({"verify": "hope"}, "'coupled', 'plain' or 'sequoia'"),
    ],
)
def test_wrong_conditions_are_told_before_anything_is_opened(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError, match=told) as caught:
        EngineConfig("m", **({**SEQUOIA, "draft": "some/model"} | settings))
    assert "\n" not in str(caught.value)


def test_without_a_draft_the_target_speaks_alone() -> None:
    EngineConfig("m", **SEQUOIA, draft="none")
