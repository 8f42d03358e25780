"""Several requests with one seed: sampled text that becomes part of a prompt is not repeated.

The target is nearly uniform over its 96 tokens: two independent answers hold the same token at one position
in a hundred, answers that meet the same random numbers nearly everywhere.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binom

import offspec
from offspec import Finished
from offspec.engine.engine import Engine
from tests.support.answers import sampling
from tests.support.tiny_models import VOCABULARY, write_model

TOKENS = 180
RULES: dict[str, dict[str, Any]] = {
    "coupled": {},
    "plain": {"verify": "plain", "draft": "suffix"},
    "sequoia": {"verify": "sequoia", "tree": "sequoia", "budget": 8, "width": 4, "temperature": 1.0},
}
# The template writes no more than the first and the last word of an answer, as others drop what it thought.
TEMPLATE = """\
{% for m in messages %}{% set words = m['content'].split() %}\
w10 {{ words[0] if words else '' }} {{ words[-1] if words else '' }} w11 {% endfor %}"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A nearly uniform target, and an independent, equally uniform draft."""
    folder = tmp_path_factory.mktemp("uniform")
    target, draft = (
        write_model(folder / name, spread=0.02, seed=seed, num_hidden_layers=1)
        for seed, name in enumerate(("target", "draft"))
    )
    settings = target / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    for file in target.glob("chat_template.*"):
        file.write_text(TEMPLATE)
    return target, draft


@pytest.fixture(scope="module", params=RULES)
def engine(request: pytest.FixtureRequest, models: tuple[Path, Path]) -> Iterator[Engine]:
    target, draft = models
    given = {"draft": str(draft), "dtype": "float32", "context": 500, "budget": 16, "width": 4}
    with offspec.load(str(target), **(given | {"learn": False} | RULES[request.param])) as engine:
        yield engine


def _repeats(first: Sequence[int], second: Sequence[int]) -> int:
    return sum(a == b for a, b in zip(first, second, strict=True))


def _by_chance(count: int) -> bool:
    """Return whether independent answers agree in `count` positions with a probability above 0.001."""
    return bool(binom.sf(count - 1, TOKENS, 1.3 / VOCABULARY) > 1e-3)


@pytest.mark.usefixtures("drafters_stay")
def test_a_passage_that_is_quoted_is_not_said_again(engine: Engine) -> None:
    prompt = [5, *range(10, 90), *range(10, 90), *range(10, 28), 9]
    assert len(prompt) == TOKENS
    said = engine.generate(prompt, sampling(1.0, TOKENS)).token_ids
    # By the rule of Sequoia tokens depend on the tree, and the last one is cut: it says at most 8 tokens.
    same = 12 if engine.config.verify == "sequoia" else 20
    assert engine.generate(prompt, sampling(1.0, 20)).token_ids[:same] == said[:same]
    again = engine.generate(said, sampling(1.0, TOKENS)).token_ids  # which begins where `said` began
    assert _by_chance(_repeats(said, again)), _repeats(said, again)


@pytest.mark.exhaustive
def test_two_turns_whose_template_drops_most_of_the_answer(engine: Engine) -> None:
    session = engine.chat(params=sampling(1.0, TOKENS))
    results = []
    for question in ("w5 w6", "w7 w8"):
        results += [event.result for event in session.send(question) if isinstance(event, Finished)]
    first, second = results
    shift = second.prompt_tokens - first.prompt_tokens
    assert 0 < shift < 12, "the answer was left out"
    repeats = _repeats(first.token_ids[shift:], second.token_ids[: TOKENS - shift])
    assert _by_chance(repeats), repeats
