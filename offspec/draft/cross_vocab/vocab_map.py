"""Map between the tokens of two vocabularies that stand for the same text.

A draft whose tokenizer differs from the target's can draft the tokens that both have (token-level
intersection: Timor et al. 2025, arXiv 2502.05202). Tokens are compared by the bytes they stand for, since the
two large families spell them differently: byte-level BPE writes " word" as Ġword, sentencepiece as ▁word, and
a line feed as Ċ or <0x0A>.

Letters: T ids of the target's tokenizer, D ids of the draft's, n pairs of tokens.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from offspec.core.errors import DraftError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNKNOWN = -1  # id of a token without a counterpart
_LEAST_SHARE = 0.01
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_ROLES = ("eos_token_id", "bos_token_id")


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Bytes of one tokenizer's tokens. Special tokens are separate, since they stand for no text.

    Of several tokens for the same text, the one that the tokenizer itself would produce comes first.
    """

    text: dict[int, bytes]
    special: dict[int, str]

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase") -> "TokenBytes":
        added: dict[int, Any] = tokenizer.added_tokens_decoder
        hidden = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        read = _reader(vocabulary)
        text, special = dict[int, bytes](), dict[int, str]()
        for token, i in sorted(vocabulary.items(), key=_precedence):
            if i in hidden:
                special[i] = token
            else:  # added tokens are stored as plain text
                text[i] = token.encode() if i in added else read(token)
        return cls(text, special)

    def __len__(self) -> int:
        return len(self.text) + len(self.special)

    def written(self, token: int) -> bytes:
        """Return a token as text; a special token as a chat template writes it."""
        text = self.text.get(token)
        return self.special.get(token, "").encode() if text is None else text

    def pieces(self) -> dict[bytes, int]:
        """Return the preferred id of each text."""
        return {text: i for i, text in reversed(self.text.items())}


def _precedence(entry: tuple[str, int]) -> tuple[bool, int]:
    """Return a sort key: a hexadecimal byte token is only a fallback, though it often has the lower id."""
    token, i = entry
    return _BYTE.fullmatch(token) is not None, i


def _reader(vocabulary: Mapping[str, int]) -> Callable[[str], bytes]:
    """Return the decoder of this vocabulary's tokens, recognized by how it writes the spaces before words."""
    byte_level = sum(token.startswith("Ġ") for token in vocabulary)
    sentencepiece = sum(token.startswith("▁") for token in vocabulary)
    if byte_level > sentencepiece:
        return _read_byte_level
    return _read_sentencepiece if sentencepiece else str.encode


def _byte_letters() -> dict[str, int]:
    """Return byte-level BPE's letter for each byte: itself if printable, else a character from 256 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


_LETTERS = _byte_letters()


def _read_byte_level(token: str) -> bytes:
    try:
        return bytes(_LETTERS[letter] for letter in token)
    except KeyError:  # not made of bytes
        return token.encode()


def _read_sentencepiece(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


@dataclass(frozen=True, slots=True, eq=False)
class VocabMap:
    """Tokens of a target and of a draft that stand for the same text or the same special token.

    draft_of [T]: the draft's id of each target id, or UNKNOWN. target_ids [n], draft_ids [n]: pairs in which
    no id occurs twice, since only the first of several tokens for one text is ever drafted. target, draft:
    token bytes of both.
    """

    draft_of: NDArray[np.int64]
    target_ids: torch.Tensor
    draft_ids: torch.Tensor
    target: TokenBytes
    draft: TokenBytes

    @classmethod
    def between(
        cls,
        target: "PreTrainedTokenizerBase",
        draft: "PreTrainedTokenizerBase",
        draft_size: int | None = None,
    ) -> "VocabMap":
        """Build the map. draft_size: number of ids of the draft's head, if its tokenizer has more.

        Raises DraftError if too few tokens are shared for drafting.
        """
        ours, theirs = TokenBytes.of(target), TokenBytes.of(draft)
        pieces = theirs.pieces()
        found = {i: pieces[text] for i, text in ours.text.items() if text in pieces}
        words = len(found)
        specials = {token: i for i, token in theirs.special.items()}
        found |= {i: specials[token] for i, token in ours.special.items() if token in specials}
        for role in _ROLES:
            one, other = getattr(target, role), getattr(draft, role)
            if one is not None and other is not None:
                found.setdefault(one, other)
        found = {i: other for i, other in found.items() if draft_size is None or other < draft_size}
        if not words or len(found) < _LEAST_SHARE * len(ours):
            raise DraftError(
                f"the draft's vocabulary shares {len(found):,} of the target's {len(ours):,} tokens, too few "
                'for drafting; name a draft of the same family, or use `draft="auto"`'
            )
        draft_of = np.full(max((*ours.text, *ours.special)) + 1, UNKNOWN, dtype=np.int64)
        draft_of[list(found)] = list(found.values())
        pairs = {other: i for i, other in reversed(found.items())}
        return cls(draft_of, torch.tensor([*pairs.values()]), torch.tensor([*pairs]), ours, theirs)

    def on(self, device: torch.device) -> "VocabMap":
        """Return a copy on the device of the logits."""
        return replace(self, target_ids=self.target_ids.to(device), draft_ids=self.draft_ids.to(device))

    @property
    def mapped(self) -> int:
        """Number of the target's tokens that the draft also has."""
        return int((self.draft_of != UNKNOWN).sum())

    @property
    def share(self) -> float:
        """Share of the target's vocabulary that the draft also has."""
        return self.mapped / len(self.target)

    @property
    def report(self) -> str:
        """One-line summary for messages."""
        return f"{self.mapped:,} of {len(self.target):,} tokens map ({100 * self.share:.0f} %)"

    def translate(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the draft's ids of target ids of any shape; UNKNOWN for tokens that the draft lacks."""
        known = tokens < len(self.draft_of)  # a head may be padded beyond its tokenizer
        return np.where(known, self.draft_of[np.where(known, tokens, 0)], UNKNOWN)

    def scatter(self, logits: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
        """Scatter the draft's logits [W, D or more] to the same tokens of the target, in `wide` [W, T].

        Other columns are left unchanged; initialize `wide` with -inf.
        """
        return wide.index_copy_(1, self.target_ids, logits.index_select(1, self.draft_ids))
