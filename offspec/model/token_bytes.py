"""The bytes of single tokens, of which a character may have several."""

import re
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # how tokenizers with byte fallback spell a byte
_SPACE = "▁"  # how they spell a space


def token_bytes(tokenizer: "PreTrainedTokenizerBase", token: int) -> bytes:
    """The bytes that a token stands for within a text.

    Decoded alone, a part of a character would be U+FFFD, and a space in front would be gone.
    """
    spelt = tokenizer.convert_ids_to_tokens(token)
    text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    if not isinstance(spelt, str):  # an id that the tokenizer has no token for
        return text.encode("utf-8", "replace")
    if byte := _BYTE.fullmatch(spelt):
        return bytes.fromhex(byte[1])
    if "\ufffd" in text and (found := [_letters().get(letter) for letter in spelt]) and None not in found:
        return bytes(byte for byte in found if byte is not None)
    if spelt.startswith(_SPACE) and not text.startswith(" "):
        text = f" {text}"
    return text.encode("utf-8", "replace")


def token_text(tokenizer: "PreTrainedTokenizerBase", token: int) -> str:
    """Text of a token within a text; U+FFFD stands for bytes that are part of a character."""
    return token_bytes(tokenizer, token).decode("utf-8", "replace")


@cache
def _letters() -> dict[str, int]:
    """The byte behind each letter of byte-level tokenizers (Radford et al. 2019).

    Printable ones are letters themselves; the others, in order, have the code points from 256 on.
    """
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + at): byte for at, byte in enumerate(others)}
