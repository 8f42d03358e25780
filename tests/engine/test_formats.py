"""Answers with an output format: valid, equal with any draft, and forced tokens cost no pass."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offspec import Engine, PassStats, RequestError, SamplingParams
from offspec.core.config import Constraint
from offspec.core.constraint import Region, Regions
from offspec.draft.base import Children, Scorer
from offspec.draft.growing_tree import GrowingTree
from offspec.model.tool_call_grammars import after_reasoning, required_call_regions
from tests.support.exhaustive import sampled_params
from tests.support.json_schema import SCHEMAS, is_valid
from tests.support.tiny_models import disturb, tiny_engine, write_model
from tests.support.tokenizers import byte_level, saved

OPENING = byte_level().token_to_id("(") or 0
PROMPT = [5, 9, 17, 33, 64, 20]
pytestmark = pytest.mark.usefixtures("drafters_stay")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["cat", "mat"]},
        "age": {"type": "integer", "minimum": 3, "maximum": 120},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
}
DESCRIBE = {"name": "describe", "parameters": PERSON}
CALL = required_call_regions("</think> <tool_call>", [DESCRIBE], {}, thinking=True, tokens=7)
assert CALL is not None
FORMATS = {
    "schema": Constraint("json_schema", PERSON),
    "regex": Constraint("regex", r"(the (cat|mat) sat( on)?, ){2}[a-z]{3,9}\."),
    "choice": Constraint("choice", ["the first of them", "the second of them", "none"]),
    "grammar": Constraint("grammar", 'start: "(" (start | /[0-9]{2,6}/) ")"'),
    "parts": Regions((Region("(", 'start: /[0-9]{2,4}/ ")"'),)).constraint(),
    "thought": after_reasoning("</think>", Constraint("json_schema", PERSON), {}, 9),
    "call": CALL.constraint(),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a similar model, with more tokens than their tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("models"), byte_level()
    found = []
    for name in ("target", "near"):
        size = tokenizer.get_vocab_size() + 19
        found.append(write_model(folder / name, num_hidden_layers=2, vocab_size=size, spread=0.3))
        saved(tokenizer, folder / name)
    disturb(folder / "near")
    return found[0], found[1]


class Hostile:
    """A drafter that proposes random tokens with high confidence, regardless of the format."""

    def __init__(self, inner: Any) -> None:
        self._inner, self._random = inner, np.random.default_rng(5)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def expand(self, candidates: GrowingTree, nodes: list[int], scorer: Scorer) -> Children:
        children: Children = self._inner.expand(candidates, nodes, scorer)
        count = children.token.shape[1]
        rows = [self._random.permutation(scorer.vocab_size)[:count] for _ in nodes]
        sure = np.tile(-np.geomspace(0.01, 5, count).astype(np.float32), (len(nodes), 1))
        return replace(children, token=np.stack(rows), log_prob=sure, x=sure)


@pytest.fixture(scope="module")
def engine(models: tuple[Path, Path]) -> Iterator[Engine]:
    target, near = models
    with tiny_engine(target, f"{near},suffix", budget=48, width=8) as found:
        yield found


def params(format: Constraint, temperature: float, seed: int = 1, tokens: int = 120) -> SamplingParams:
    bias = {OPENING: 4.0} if format is FORMATS["parts"] else {}
    tokens += 80 if format is FORMATS["call"] else 0
    return SamplingParams(
        temperature=temperature, seed=seed, max_tokens=tokens, format=format, logit_bias=bias
    )


def has_format(name: str, text: str) -> bool:
    match name:
        case "schema":
            return is_valid(json.loads(text), PERSON)
        case "regex":
            return bool(re.fullmatch(FORMATS[name].text, text))
        case "choice":
            return text in json.loads(FORMATS[name].text)
        case "parts":
            parts = text.split("(")[1:]
            return len(parts) > 2 and all(re.match(r"[0-9]{2,4}\)", part) for part in parts[:-1])
        case "thought":
            return is_valid(
                json.loads(text.partition("</think>\n\n")[2] or text.partition("</think>")[2]), PERSON
            )
        case "call":
            call = re.search(r"</think>\s*<tool_call>\n(.*)\n</tool_call>$", text)
            return call is not None and is_valid(json.loads(call[1])["arguments"], PERSON)
        case _:
            depth = text.count("(")
            return bool(re.fullmatch(rf"\({{{depth}}}[0-9]{{2,6}}\){{{depth}}}", text))


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        *[("schema", 1.0), ("regex", 0.0), ("choice", 1.0), ("grammar", 0.0), ("parts", 0.0), ("parts", 1.0)],
        *[("thought", 0.0), ("thought", 1.0), ("call", 0.0), ("call", 1.0)],
    ],
)
def test_speculation_changes_nothing(engine: Engine, name: str, temperature: float) -> None:
    for seed in (1, 2):
        result = engine.generate(PROMPT, params(FORMATS[name], temperature, seed), check=True)
        assert result.mismatches == ()
        if result.finish_reason == "eos":
            assert has_format(name, result.text), result.text
        else:
            assert result.finish_reason == "length" and name in ("grammar", "parts"), "text may go on"
            assert name == "grammar" or has_format(name, result.text), result.text


@pytest.mark.parametrize(
    "draft", sampled_params(["hostile", "self", "suffix", "plain", "one path"], "hostile")
)
def test_draft_sources_change_nothing(draft: str, models: tuple[Path, Path], engine: Engine) -> None:
    target, near = models
    formats = FORMATS["schema"], FORMATS["parts"], FORMATS["call"]
    asked = [params(format, temperature, 4) for temperature in (0.0, 1.0) for format in formats]
    expected = [engine.generate(PROMPT, one, speculate=False).token_ids for one in asked]
    known: dict[str, dict[str, Any]] = {
        "hostile": {"draft": near, "wrap": Hostile},
        "plain": {"draft": near, "verify": "plain"},
        "one path": {"draft": near},
    }
    with tiny_engine(target, budget=32, width=6, **known.get(draft, {"draft": draft})) as other:
        if draft == "one path":
            object.__setattr__(other._assembly.target.skeleton, "branches", False)
        for one, tokens in zip(asked, expected, strict=True):
            assert other.generate(PROMPT, one).token_ids == tokens


def test_forced_tokens_cost_no_pass(models: tuple[Path, Path], engine: Engine) -> None:
    """The text of property names is forced by the token that decided for it, without a draft step."""
    names = [f"a_rather_long_name_{number}" for number in range(4)]
    schema = {
        "type": "object",
        "properties": {name: {"type": "boolean"} for name in names},
        "required": names,
        "additionalProperties": False,
    }
    asked = params(Constraint("json_schema", schema), 1.0)
    with tiny_engine(models[0], "suffix", budget=64) as other:
        events = list(other.stream(PROMPT, asked))
        result = other.generate(PROMPT, asked, draft="lookup")
    passes = [event for event in events if isinstance(event, PassStats)]
    assert len(passes) <= len(names) + 1
    assert result.tokens > 60 and dict(result.guessed_by)["format"] >= result.tokens - 2 * len(names)
    assert engine.generate(PROMPT, asked).passes <= len(passes), "and a draft guesses the rest"
    assert engine.generate(PROMPT, asked, speculate=False).passes == result.tokens


def test_tokens_per_pass_are_no_fewer_than_without_format(engine: Engine) -> None:
    """The answer under a format is repeated with a bias for each of its tokens instead of the format."""
    asked = params(FORMATS["schema"], 1.0, seed=3)
    with_format = engine.generate(PROMPT, asked)
    bias = dict.fromkeys(set(with_format.token_ids), 60.0)
    told = replace(asked, format=None, logit_bias=tuple(bias.items()), max_tokens=with_format.tokens)
    without = engine.generate(PROMPT, replace(told, ignore_eos=True))
    assert with_format.tokens_per_pass >= without.tokens_per_pass
    assert with_format.tokens_per_pass > 8


def test_a_cut_answer_is_reported(engine: Engine) -> None:
    whole = engine.generate(PROMPT, params(FORMATS["schema"], 1.0))
    cut = engine.generate(PROMPT, params(FORMATS["schema"], 1.0, tokens=20), check=True)
    assert (whole.finish_reason, cut.finish_reason, cut.mismatches) == ("eos", "length", ())
    assert whole.text.startswith(cut.text) and len(cut.token_ids) == 20
    with pytest.raises(ValueError):
        json.loads(cut.text)


def test_invalid_formats_are_refused_and_the_engine_stays_usable(engine: Engine) -> None:
    with pytest.raises(RequestError, match="json schema cannot be enforced: Invalid type"):
        engine.generate(PROMPT, params(Constraint("json_schema", {"type": "shoe"}), 0.0))
    with pytest.raises(RequestError, match="format together exclude all of them"):
        engine.generate(PROMPT, replace(params(FORMATS["choice"], 0.0), allowed_token_ids=(3, 4)))
    assert engine.generate(PROMPT, params(FORMATS["choice"], 0.0)).finish_reason == "eos"


@pytest.mark.parametrize("share", sampled_params(range(3), 0))
def test_a_hundred_schemas(engine: Engine, share: int) -> None:
    for schema in SCHEMAS[share::20]:
        for temperature in (0.0, 1.0):
            asked = params(Constraint("json_schema", schema), temperature, tokens=200)
            result = engine.generate(PROMPT, asked)
            assert result.finish_reason == "eos", (schema, result.text)
            assert is_valid(json.loads(result.text), schema), (schema, result.text)
