"""Formats as rules: at each node of a tree, the mask of a matcher that reads its text from the beginning."""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import AutoTokenizer

from offspec.chat.conversation import Conversation
from offspec.core.config import Constraint, SamplingParams
from offspec.core.errors import RequestError
from offspec.sampling.format_rule import FormatRule
from offspec.sampling.grammar import check_format, matcher_of
from offspec.sampling.logits_processor import LogitsProcessor
from tests.support.json_schema import SCHEMAS
from tests.support.tokenizers import byte_fallback, byte_level, saved

END = 1
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["cat", "mat"]},
        "age": {"type": "integer", "minimum": 3, "maximum": 120},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
FORMATS = [
    Constraint("json_schema", PERSON),
    Constraint("json_object"),
    Constraint("regex", r"(ab|a)*c{2,3}"),
    Constraint("choice", ["yes", "no (really)", "é\n\\d"]),
    Constraint("grammar", 'start: item ("," item)*\nitem: /[0-9]{1,2}/ | "(" item ")"'),
    Constraint("grammar", 'root ::= "the " ("cat" | "mat") "."'),
]


@pytest.fixture(scope="module", params=["bytes", "pieces"])
def vocabulary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer of each kind, for transformers and for llguidance."""
    make = byte_level if request.param == "bytes" else byte_fallback
    tokenizer = AutoTokenizer.from_pretrained(saved(make(), tmp_path_factory.mktemp("tokenizer")))
    return tokenizer, from_tokenizer(tokenizer, eos_token=[END])


def rule(format: Constraint, tokens: LLTokenizer, size: int | None = None) -> FormatRule:
    return FormatRule(matcher_of(format, tokens), size or tokens.vocab_size, tokens.vocab_size, {END})


def open_tokens(found: FormatRule, paths: Sequence[Sequence[int]], size: int) -> list[set[int]]:
    scores = torch.zeros(len(paths), size)
    found.apply(scores, paths)
    return [set(row.isfinite().nonzero()[:, 0].tolist()) for row in scores]


def allowed_by_new_matcher(format: Constraint, tokens: LLTokenizer, path: Sequence[int]) -> set[int]:
    """Return the tokens that may follow a text, according to a new matcher."""
    if path and path[-1] == END:
        return set()
    matcher = matcher_of(format, tokens)
    if matcher.try_consume_tokens(list(path)) < len(path):
        return set()
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return set(np.flatnonzero(np.unpackbits(bits, bitorder="little")[: tokens.vocab_size]).tolist())


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.kind)
def test_each_node_has_the_mask_of_its_own_text(format: Constraint, vocabulary: Any) -> None:
    """Nodes at random places of a tree, in any order, while the committed text grows."""
    _, tokens = vocabulary
    size, chance = tokens.vocab_size + 13, random.Random(3)
    found, said = rule(format, tokens, size), list[int]()
    while True:
        paths: list[list[int]] = [[]]
        for _ in range(12):
            path = chance.choice(paths)
            known = sorted(allowed_by_new_matcher(format, tokens, [*said, *path]))
            wrong = [chance.randrange(size)] if chance.random() < 0.2 else []
            if known or wrong:
                paths.append([*path, *(wrong or [chance.choice(known)])])
        chance.shuffle(paths)
        expected = [allowed_by_new_matcher(format, tokens, [*said, *path]) for path in paths]
        assert open_tokens(found, paths, size) == expected
        for path, may_come in zip(paths, expected, strict=True):
            forced = found.forced_tokens(path, 4)
            assert (len(may_come) == 1) == bool(forced) and set(forced[:1]) <= may_come
            assert found.allows_path(path) == (
                not path or path[-1] in allowed_by_new_matcher(format, tokens, [*said, *path[:-1]])
            )
        ahead = max((path for path in paths if found.allows_path(path)), key=len)[: chance.randint(1, 4)]
        found.commit(ahead)
        said += ahead
        if END in ahead or len(said) > 40:
            break


def test_device_masks_equal_cpu_masks(device: torch.device, vocabulary: Any) -> None:
    _, tokens = vocabulary
    size = tokens.vocab_size + 13  # not a whole number of bytes
    given = FormatRule(matcher_of(FORMATS[0], tokens), size, tokens.vocab_size, {END}, device)
    paths = [[], given.forced_tokens([], 1), given.forced_tokens([], 99)]
    there = torch.zeros(3, size, device=device)
    given.apply(there, paths)
    assert [set(row.isfinite().nonzero()[:, 0].tolist()) for row in there.cpu()] == open_tokens(
        rule(FORMATS[0], tokens, size), paths, size
    )
    assert len(paths[2]) > len(paths[1]) == 1


def test_answers_end_where_the_format_allows(vocabulary: Any) -> None:
    tokenizer, tokens = vocabulary
    size = tokens.vocab_size
    found = rule(Constraint("regex", "a(bc)*"), tokens)
    for text, may_end in (("", False), ("a", True), ("ab", False), ("abc", True), ("abcb", False)):
        path = [tokenizer.convert_tokens_to_ids(letter) for letter in text] if size > 300 else None
        ids = path if path and None not in path else tokens.tokenize_str(text)
        (may_come,) = open_tokens(found, [ids], size)
        assert (END in may_come) == may_end and may_come
        assert open_tokens(found, [[*ids, END]], size) == [set()], "nothing follows the end"
    only = rule(Constraint("choice", ["a"]), tokens)
    ids = tokens.tokenize_str("a")
    assert only.forced_tokens([], 9) == [*ids, END], "the end is forced too"
    assert only.forced_tokens([], 1) == ids[:1] and only.forced_tokens(ids, 9) == [END]
    processor = LogitsProcessor(SamplingParams(), size, [], format=only)
    assert processor.choose(torch.zeros(size), [], None, 0) == (ids[0], math.inf)


def test_invalid_draft_tokens_are_harmless(vocabulary: Any) -> None:
    """Masks of impossible tokens may be requested, and the same matcher continues."""
    _, tokens = vocabulary
    found, size = rule(FORMATS[0], tokens), tokens.vocab_size
    (expected,) = open_tokens(rule(FORMATS[0], tokens), [[]], size)
    assert open_tokens(found, [[END], [5, 6], [size - 1, 3], [10**6], [-1], []], size) == [set()] * 5 + [
        expected
    ]
    assert not found.allows_path([END]) and not found.forced_tokens([5], 3)


def test_hundred_schemas() -> None:
    assert len(SCHEMAS) == 100
    for schema in SCHEMAS:
        check_format(Constraint("json_schema", schema))


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("json_schema", {"not": {"type": "string"}}, 'Unimplemented keys: \\["not"\\]'),
        ("json_schema", {"$ref": "#/nowhere"}, "/nowhere"),
        ("grammar", 'start: "a" b', 'unknown name: "b"'),
    ],
)
def test_unsupported_formats_are_refused_with_the_reason(
    kind: str, text: Any, said: str, vocabulary: Any
) -> None:
    format, refused = Constraint(kind, text), f"{kind.replace('_', ' ')} cannot be enforced: .*{said}"
    for refuse in (check_format, lambda format: matcher_of(format, vocabulary[1])):
        with pytest.raises(RequestError, match=refused) as error:
            refuse(format)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("xml", "", "one of json_schema"),
        ("json_schema", "{", "must be JSON"),
        ("json_schema", "[]", "must be a JSON object"),
        ("json_schema", '{"a":' * 10**5, "nested too deeply"),
        ("json_schema", {"a": {1, 2}}, "cannot be written as JSON"),
        ("json_object", "{}", "did you mean json_schema"),
        ("regex", "", "must not be empty"),
        ("regex", "(a", r"invalid regex '\(a': unclosed group at character 1, '\(a'"),
        ("regex", "\ud800", "Unicode"),
        ("choice", "[]", "list of texts"),
        ("choice", ["a", ""], "list of texts"),
    ],
)
def test_invalid_formats(kind: str, text: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        Constraint(kind, text)


def test_formats_with_other_parameters(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="ignore_eos must be False"):
        SamplingParams(format=FORMATS[0], ignore_eos=True)
    given: Any = {"kind": "regex", "text": "a+"}
    assert SamplingParams(format=given).format == Constraint("regex", "a+")
    for wrong in ("regex", {"text": "a"}, {"kind": "regex", "text": "a", "strict": True}):
        with pytest.raises(RequestError, match="format must be a Constraint, or its kind and text"):
            SamplingParams(format=wrong)
    params = SamplingParams(format=Constraint("json_schema", PERSON))
    (tmp_path / "kept.json").write_text(Conversation(model="m", params=params).to_text(), "utf-8")
    assert Conversation.read(tmp_path / "kept.json").params == params, "sessions keep it"
