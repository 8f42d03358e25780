"""Tokenizer vocabularies: bytes of tokens, fill-in-the-middle tokens, and comparison of two vocabularies.

Fill-in-the-middle tokens (Bavarian et al. 2022) ask for the text between a prefix and a suffix.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a byte in tokenizers with byte fallback
_SPACE = "▁"  # a space in these tokenizers
# Tokens that only pad the vocabulary to the size of the embedding, as in GGUF files.
_PADDING = re.compile(r"[<\[|]*(pad|unused|extra|reserved|dummy)[a-z_]*?[ _-]*\d+[>\]|]*", re.IGNORECASE)
# Tokens before the prefix, before the suffix, and before the text to generate.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
_ENDS = (
    *("<|endoftext|>", "▁<EOT>", "<|fim_pad|>", "<fim_pad>", "<|repo_name|>", "<|file_sep|>"),
    *("<|file_separator|>", "<file_sep>"),
)


def same_vocabulary(a: "PreTrainedTokenizerBase", b: "PreTrainedTokenizerBase") -> str | None:
    """Return None if two tokenizers give the same ids to the same tokens, else a line with a difference.

    Numbered padding at the end of one of them (`[PAD151700]`, `<unused7>`) does not count as a difference.
    """
    first, second = ({i: token for token, i in x.get_vocab().items()} for x in (a, b))
    different = [i for i in first.keys() | second.keys() if first.get(i) != second.get(i)]
    shared = min(max(first, default=-1), max(second, default=-1))
    different = [
        i for i in different if i <= shared or not _PADDING.fullmatch(first.get(i) or second.get(i) or "")
    ]
    if not different:
        return None
    where = min(different)
    tokens = [repr(x[where]) if where in x else "nothing" for x in (first, second)]
    sizes = f"{len(first)} and {len(second)} tokens" if len(first) != len(second) else f"{len(first)} tokens"
    return f"token {where} is {tokens[0]} in one and {tokens[1]} in the other ({sizes})"


def token_bytes(tokenizer: "PreTrainedTokenizerBase", token: int) -> bytes:
    """Return the bytes of a token within a text.

    If the token were decoded alone, part of a character would become U+FFFD, and a leading space would be
    lost.
    """
    name = tokenizer.convert_ids_to_tokens(token)
    text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    if not isinstance(name, str):  # an id without a token
        return text.encode("utf-8", "replace")
    if byte := _BYTE.fullmatch(name):
        return bytes.fromhex(byte[1])
    if "\ufffd" in text and (found := [_letters().get(letter) for letter in name]) and None not in found:
        return bytes(byte for byte in found if byte is not None)
    if name.startswith(_SPACE) and not text.startswith(" "):
        text = f" {text}"
    return text.encode("utf-8", "replace")


def token_text(tokenizer: "PreTrainedTokenizerBase", token: int) -> str:
    """Return the text of a token within a text, with U+FFFD for bytes that are only part of a character."""
    return token_bytes(tokenizer, token).decode("utf-8", "replace")


@cache
def _letters() -> dict[str, int]:
    """Return the byte for each letter of byte-level tokenizers (Radford et al. 2019)."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}


@dataclass(frozen=True, slots=True)
class FimTokens:
    """Ids of the tokens before prefix, suffix and middle, and of tokens that end the middle."""

    prefix: int
    suffix: int
    middle: int
    ends: tuple[int, ...]


def find_fim_tokens(vocabulary: Mapping[str, int]) -> FimTokens | None:
    """Return the fill-in-the-middle tokens of a vocabulary, or None if it has no known ones."""
    for names in _MARKS:
        if all(name in vocabulary for name in names):
            prefix, suffix, middle = (vocabulary[name] for name in names)
            ends = (vocabulary[name] for name in (*names, *_ENDS) if name in vocabulary)
            return FimTokens(prefix, suffix, middle, tuple(ends))
    return None
