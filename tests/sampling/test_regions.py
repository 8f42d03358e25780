"""Constrained parts of answers: text outside regions is free, and each region has a matcher of its own."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import AutoTokenizer

from offspec.chat.answer_parser import ToolCall
from offspec.chat.chat_format_parser import ChatFormatParser
from offspec.chat.chat_formats import chat_format_of, reasoning_marks
from offspec.core.config import Constraint
from offspec.core.constraint import Regions
from offspec.core.errors import RequestError
from offspec.model.tool_call_grammars import FORMS, after_reasoning, answer_regions
from offspec.model.vocabulary import token_bytes
from offspec.sampling.format_rule import FormatRule
from offspec.sampling.grammar import Grammars, tokens_extending
from offspec.sampling.regions import RegionRule
from tests.support.tokenizers import byte_level, saved

END = 1
FUNCTIONS: list[dict[str, Any]] = [
    {
        "name": "write_file",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string", "maxLength": 6},
                "mode": {"enum": ["w", "a"]},
                "size": {"type": "integer", "maximum": 99, "minimum": 0},
            },
            "required": ["path", "size"],
            "additionalProperties": False,
        },
    },
    {"name": "stop", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
CLOSED = {"<function=": "\n</parameter>\n", "<arg_key>": "</arg_value>\n"}  # ends a text without quotes
PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(saved(byte_level(), tmp_path_factory.mktemp("tokenizer")))
    return tokenizer, from_tokenizer(tokenizer, eos_token=[END])


def rule_of(regions: Regions, tokenizer: Any, tokens: LLTokenizer, device: str = "cpu") -> RegionRule:
    size, grammars = tokens.vocab_size, Grammars(tokens)
    return RegionRule(
        Regions.read(regions.constraint().text),
        lambda grammar: FormatRule(grammars.matcher(grammar), size, size, {END}, device),
        lambda text: tokens_extending(text, tokens),
        lambda token: token_bytes(tokenizer, token),
        {END},
    )


def ids_of(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def open_tokens(rule: RegionRule, paths: Sequence[Sequence[int]], size: int) -> list[set[int]]:
    scores = torch.zeros(len(paths), size)
    rule.apply(scores, paths)
    return [set(row.isfinite().nonzero()[:, 0].tolist()) for row in scores]


@pytest.mark.parametrize("mark", FORMS)
def test_every_sampled_call_is_valid(mark: str, vocabulary: Any) -> None:
    """From the opening mark on, the sampled text is a valid call; then everything is free again."""
    tokenizer, tokens = vocabulary
    regions = answer_regions(mark, FUNCTIONS, {}, thinking=False)
    assert regions is not None
    region = regions.regions[0]
    family, size = chat_format_of(mark), tokens.vocab_size
    for seed in range(8):
        dice = random.Random(seed)
        rule, said = rule_of(regions, tokenizer, tokens), list[int]()
        for token in ids_of(tokenizer, region.mark):
            assert rule.allows_path([token]) and token in open_tokens(rule, [[]], size)[0]
            rule.commit([token])
            said.append(token)
        for _ in range(400):
            found = rule.forced_tokens([], 9)
            if not found:
                allowed = open_tokens(rule, [[]], size)[0]
                if len(allowed) > size - 9:
                    break
                assert END not in allowed, "an answer could end within a call"
                found = [dice.choice(sorted(allowed))]
                if len(allowed) > size // 2 and mark in CLOSED and dice.random() < 0.3:
                    found = ids_of(tokenizer, CLOSED[mark])
            assert rule.allows_path(found)
            rule.commit(found)
            said += found
        else:
            pytest.fail("the call did not end")
        if family and family.messages and "to=functions" not in tokenizer.decode(said):
            continue  # the header of another message
        reader = ChatFormatParser(family, None, tools=TOOLS)
        text = b"".join(token_bytes(tokenizer, token) for token in said).decode()
        parts = [*reader.feed(text), *reader.finish()]
        assert parts and all(isinstance(part, ToolCall) for part in parts), text


def test_each_node_has_the_mask_of_its_own_text(vocabulary: Any) -> None:
    tokenizer, tokens = vocabulary
    regions = answer_regions("<tool_call>", FUNCTIONS, {}, thinking=False)
    assert regions is not None
    size = tokens.vocab_size
    paths = [
        ids_of(tokenizer, text)
        for text in (
            "",
            "a",
            "<tool",
            "<tool_call>",
            '<tool_call>\n{"name": "st',
            "<tool_call>\nx",
            "a <too b",
        )
    ]
    together = rule_of(regions, tokenizer, tokens)
    found = open_tokens(together, paths, size)
    for path, allowed in zip(paths, found, strict=True):
        assert open_tokens(rule_of(regions, tokenizer, tokens), [path], size) == [allowed]
        committed = rule_of(regions, tokenizer, tokens)
        committed.commit(path)
        assert open_tokens(committed, [[]], size) == [allowed]
    assert len(found[0]) == size == len(found[1]) and not found[5] and len(found[6]) == size
    assert together.forced_tokens(paths[3], 99)[:2] == ids_of(tokenizer, '\n{"name": "')[:2]


@pytest.mark.gpu
def test_gpu_masks_equal_cpu_masks(vocabulary: Any) -> None:
    tokenizer, tokens = vocabulary
    regions = answer_regions("<tool_call>", FUNCTIONS, {}, thinking=False)
    assert regions is not None
    paths = [
        ids_of(tokenizer, text) for text in ("a", "<tool", "<tool_call>", "<tool_call>\nx", "<tool_call>\n{")
    ]
    scores = [torch.randn(len(paths), tokens.vocab_size)]
    scores.append(scores[0].cuda())
    for device, given in zip(("cpu", "cuda"), scores, strict=True):
        rule_of(regions, tokenizer, tokens, device).apply(given, paths)
    assert scores[0].isinf().any() and torch.equal(scores[0], scores[1].cpu())


@pytest.mark.parametrize("tokens_of_thought", [None, 5])
def test_schema_after_reasoning(vocabulary: Any, tokens_of_thought: int | None) -> None:
    tokenizer, tokens = vocabulary
    format = after_reasoning("</think>", Constraint("json_schema", PERSON), {}, tokens_of_thought)
    rule, size = rule_of(Regions.read(format.text), tokenizer, tokens), tokens.vocab_size
    thought = ids_of(tokenizer, "the cat sat {")[: tokens_of_thought or 99]
    for token in thought:
        assert END not in open_tokens(rule, [[]], size)[0], "the answer could end within the thought"
        rule.commit([token])
    said = list(thought)
    if tokens_of_thought is None:
        for token in ids_of(tokenizer, "</think>"):
            assert rule.allows_path([token])
            rule.commit([token])
            said.append(token)
    while open_tokens(rule, [[]], size)[0] != {END}:
        found = rule.forced_tokens([], 20) or [min(open_tokens(rule, [[]], size)[0] - {END})]
        rule.commit(found)
        said += found
        if len(said) > 400:
            break
    text = tokenizer.decode(said)
    _, _, answer = text.partition("</think>")
    number = answer.strip().removeprefix('{"age": ')
    assert answer.strip().startswith('{"age": ') and (number[:1].isdigit() or number[:1] == "-"), text


def test_invalid_regions() -> None:
    for text in (
        "[]",
        "{}",
        '{"regions": [{"mark": ""}]}',
        '{"regions": [{"mark": "a", "grammar": ""}]}',
        "3",
    ):
        with pytest.raises(RequestError):
            Constraint("regions", text)
    with pytest.raises(RequestError):
        Constraint("regions", json.dumps({"required": "start: A", "colour": 1}))
    assert reasoning_marks("nothing") is None and answer_regions("nothing", FUNCTIONS, {}, False) is None


ODD: dict[str, Any] = {
    "nothing": None,
    "a text": {"type": "string"},
    "or nothing": {"type": ["object", "null"]},
    "a reference": {"$ref": "#/$defs/x", "$defs": {"x": PERSON}},
    "a reference elsewhere": {"properties": {"a": {"$ref": "http://x/y"}, "b": PERSON}, "required": ["a"]},
    "an endless one": {"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}},
    "one of": {"oneOf": [PERSON, {"type": "object"}]},
    "any": {"type": "object", "additionalProperties": {"type": "integer"}},
    "a missing property": {"properties": {"a": {"type": "string"}}, "required": ["b"]},
    "a list of properties": {"properties": ["a"]},
    "a wrong requirement": {"properties": {"a": {}}, "required": 5},
    "a wrong choice": {"properties": {"a": {"enum": 5}, "b": {"enum": [None, 1]}}},
    "wrong lengths": {"properties": {"a": {"type": "string", "minLength": -1, "maxLength": 5.5}}},
    "names with signs": {"properties": {"a>b": {"type": "string"}, 'c"\n\\': {"type": "integer"}}},
    "an unknown type": {"type": "objekt", "properties": {"a": {"type": "shoe"}}},
    "guidance": {"x-guidance": 5, "properties": {"a": {"type": "string"}}},
    "unique items": {"properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]},
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("mark", ["<tool_call>", "<function=", "<arg_key>"])
def test_unusual_schemas_have_a_grammar(mark: str, odd: str, vocabulary: Any) -> None:
    """Or at least a grammar that does not end an answer."""
    tokenizer, tokens = vocabulary
    functions = [{"name": "f", "parameters": ODD[odd]}, FUNCTIONS[1]]
    regions = answer_regions(mark, functions, {}, thinking=False)
    assert regions is not None
    rule = rule_of(regions, tokenizer, tokens)
    opening = {
        "<tool_call>": '<tool_call>\n{"name": "f"',
        "<function=": "<function=f",
        "<arg_key>": "<tool_call>f",
    }
    for token in ids_of(tokenizer, opening[mark]):
        assert rule.allows_path([token])
        rule.commit([token])
