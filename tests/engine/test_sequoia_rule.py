"""Engines that verify by Sequoia's rule; for the distribution of samples see `test_distribution.py`."""

from typing import Any

import pytest

from offspec import RequestError, SamplingParams
from offspec.core.config import EngineConfig
from tests.support.plan_fixtures import PROMPT, PlanEnvironment

SEQUOIA: dict[str, Any] = {"verify": "sequoia", "tree": "sequoia", "temperature": 1.0}
RULES: dict[str, Any] = {
    "logit_bias": {7: 1.5, 9: -1.0},
    "allowed_token_ids": range(2, 12),
    "no_repeat_ngram_size": 2,
    "bad_words": ["w3", "w7 w8", "w7 w9"],
    "min_tokens": 1,
    "stop_token_ids": (10,),
    "ignore_eos": False,
}


def _params(seed: int, tokens: int = 30, **settings: Any) -> SamplingParams:
    given = {"temperature": 1.0, "ignore_eos": True} | settings
    return SamplingParams(seed=seed, max_tokens=tokens, **given)


@pytest.mark.usefixtures("drafters_stay")
def test_a_draft_like_the_target_is_always_right(plan_env: PlanEnvironment) -> None:
    """The same seed emits the same tokens again."""
    said: list[list[tuple[int, ...]]] = []
    for _ in range(2):
        with plan_env.load(draft=str(plan_env.target), learn=False, **SEQUOIA) as engine:
            results = [engine.generate(PROMPT, _params(seed)) for seed in range(3)]
            known = engine.drafting.calibration(str(plan_env.target), 1.0, False)
        said.append([result.token_ids for result in results])
    assert said[0] == said[1] and len(set(said[0])) == 3
    assert sum(result.passes for result in results) < 3 * 30 / 2
    hits = known.table.hits
    assert hits[:, 0].sum() > 0.9 * hits.sum(), "the first that is drawn is accepted"
    assert known.fit.observations == 0, "what is drawn tells nothing of how scores are to be read"


@pytest.mark.usefixtures("drafters_stay")
def test_greedy_answers_are_those_of_every_rule(plan_env: PlanEnvironment) -> None:
    with plan_env.load(**SEQUOIA) as engine:
        for rules in ({}, RULES):
            params = _params(1, temperature=0.0, **rules)
            result = engine.generate(PROMPT, params, check=True)
            assert result.mismatches == ()
            alone = engine.generate(PROMPT, params, speculate=False)
            assert result.token_ids == alone.token_ids and result.passes < alone.passes


def test_sampled_and_ranked_drafts_have_separate_records(plan_env: PlanEnvironment) -> None:
    """Calibrations of both kinds are learnt without the target's noise; ranks have other probabilities."""
    with plan_env.load(**SEQUOIA) as engine:
        engine.generate(PROMPT, _params(1))
    assert len(list((plan_env.cache / "drafts").iterdir())) == 1
    with plan_env.load(verify="plain", tree="sequoia", temperature=1.0) as engine:
        known = engine.drafting.calibration(str(plan_env.near), 1.0, False)
        assert known.passes == 0
        engine.generate(PROMPT, _params(1))
    assert len(list((plan_env.cache / "drafts").iterdir())) == 2


def test_unsupported_requests_are_refused(plan_env: PlanEnvironment) -> None:
    """A comparison, and sources that draw nothing."""
    with plan_env.load(**SEQUOIA) as engine:
        for ask in (engine.generate, engine.stream):
            with pytest.raises(RequestError, match=r'`check` .*`verify="coupled"` or `temperature=0`'):
                ask(PROMPT, _params(1), check=True)
        with pytest.raises(RequestError, match="needs a single draft"):
            engine.generate(PROMPT, _params(1), draft="lookup,suffix")
        assert engine.generate(PROMPT, _params(1), draft="none").passes == 30


@pytest.mark.parametrize(
    "settings,told",
    [
        ({"tree": "dynamic"}, '`tree="sequoia"`'),
        ({"draft": "suffix"}, "needs a single draft"),
        ({"draft": "suffix,self"}, "not suffix,self"),
        ({"verify": "hope"}, "'coupled', 'plain' or 'sequoia'"),
    ],
)
def test_invalid_settings_are_errors_before_anything_is_opened(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError, match=told) as caught:
        EngineConfig("m", **({**SEQUOIA, "draft": "some/model"} | settings))
    assert "\n" not in str(caught.value)


def test_without_a_draft_the_target_speaks_alone() -> None:
    EngineConfig("m", **SEQUOIA, draft="none")
