"""Bytes of single tokens: put together, they are the bytes of the text."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers

from offspec.model.token_bytes import token_bytes
from offspec.model.tokenizer import load_tokenizer
from tests.support.tokenizers import byte_fallback, byte_level, saved

TEXTS = ["the cat sat on the mat", "日本語の文字", "🎉 👩‍🚀 naïve\ncafé", "\ufffd!", " two  spaces "]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_bytes_of_tokens_are_the_bytes_of_the_text(
    make: Callable[[], tokenizers.Tokenizer], tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(saved(make(), tmp_path))
    parts = set[bytes]()
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        found = [token_bytes(tokenizer, token) for token in ids]
        front = b" " if make is byte_fallback else b""  # which it puts in front of every text
        assert b"".join(found) == front + text.encode()
        parts.update(found)
    assert any(not _is_text(part) for part in parts)  # there were halves of characters among them


def test_special_tokens_and_ids_without_a_token(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(saved(byte_level(), tmp_path))
    assert token_bytes(tokenizer, tokenizer.convert_tokens_to_ids("</s>")) == b"</s>"
    assert token_bytes(tokenizer, len(tokenizer) + 5) == b""


def _is_text(part: bytes) -> bool:
    try:
        part.decode()
    except UnicodeDecodeError:
        return False
    return True
