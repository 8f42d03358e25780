"""From tokens to parts with a real tokenizer."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from offspec.chat.answer_parser import AnswerPart, TextPart, ToolCall
from offspec.engine.detokenizer import TextStream
from offspec.model import answer_formats
from offspec.model.tokenizer import TextCodec, load_tokenizer
from tests.support.tokenizers import byte_level, saved

TOOLS: Any = [{"type": "function", "function": {"name": "at", "parameters": {"type": "object"}}}]
ANSWER = 'the cat[TOOL_CALLS]at[ARGS]{"mat": 2}</s>'


def parts_of(codec: TextCodec, text: str) -> list[AnswerPart]:
    make = answer_formats.find_parts_factory(codec, calls=True)
    assert make is not None
    parts = make("", TOOLS)
    stream = TextStream(codec, shown=parts.shown)
    for token in codec.tokenize(text):
        stream.push(token)
    return [*parts.feed("".join(stream.finish())), *parts.finish()]


def test_marks_that_are_special_tokens(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in ("[TOOL_CALLS]", "[ARGS]")])
    folder = saved(tokenizer, tmp_path, chat_template="{{ messages }} [TOOL_CALLS]")
    codec = TextCodec(load_tokenizer(folder), folder, {})
    assert "[TOOL_CALLS]" not in codec.decode(codec.tokenize(ANSWER))  # text alone does not show them
    assert parts_of(codec, ANSWER) == [TextPart("the cat"), ToolCall("at", '{"mat": 2}')]
