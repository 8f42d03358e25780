"""From tokens to parts with real tokenizers: marks that are special tokens, a tokenizer's own template."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from offspec.chat.answer_parts import Call, MarkedParts, Part, Text
from offspec.engine.detokenizer import TextStream
from offspec.model import answer_formats
from offspec.model.tokenizer import TextCodec, load_tokenizer
from tests.support.tokenizers import byte_level, saved

TOOLS: Any = [{"type": "function", "function": {"name": "at", "parameters": {"type": "object"}}}]
ANSWER = 'the cat[TOOL_CALLS]at[ARGS]{"mat": 2}</s>'


def parts_of(codec: TextCodec, text: str) -> list[Part]:
    given = answer_formats.find(codec, calls=True)
    assert given is not None
    parts = MarkedParts(given, "", TOOLS)
    stream = TextStream(codec, shown=parts.shown)
    for token in codec.tokenize(text):
        stream.push(token)
    return [*parts.feed("".join(stream.finish())), *parts.finish()]


def make_codec(folder: Path, **more: Any) -> TextCodec:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in ("[TOOL_CALLS]", "[ARGS]")])
    return TextCodec(load_tokenizer(saved(tokenizer, folder, **more)), folder, {})


def test_marks_that_are_special_tokens(tmp_path: Path) -> None:
    codec = make_codec(tmp_path, chat_template="{{ messages }} [TOOL_CALLS]")
    assert "[TOOL_CALLS]" not in codec.decode(codec.tokenize(ANSWER))  # text alone does not show them
    assert parts_of(codec, ANSWER) == [Text("the cat"), Call("at", '{"mat": 2}')]


def test_a_tokenizers_own_template_comes_first(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
    own = {
        "start_anchor": "[BOT]",
        "fields": {
            "content": {},
            "tool_calls": {
                "open_pattern": r"\[TOOL_CALLS\](?P<name>\w+)\[ARGS\]",
                "content": "json",
                "transform": call,
            },
        },
    }
    codec = make_codec(tmp_path, chat_template="<tool_call>", response_template=own)
    assert parts_of(codec, ANSWER) == [Text("the cat"), Call("at", '{"mat": 2}')]
