"""Output constraints as logits rules, which allow only tokens that can still lead to a valid text.

A mask of 49,152 tokens takes about 40 µs, and drafters, tree growth and the target all need it. So states and
their masks are cached in a tree, by the tokens after the committed text.

Letters: V vocabulary, B its bytes as bits, W nodes.
"""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Optional

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offspec.core.errors import RequestError
from offspec.sampling.logits_rules import LogitsRule
from offspec_kernels.transfer import upload

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask = NDArray[np.uint8]


class FormatState:
    """Grammar state after a given text.

    token: last token of the text. is_live: whether the text is allowed and does not end the answer. mask: [B]
    uint8, allowed tokens; token t is bit t % 8 of byte t // 8. forced_token: the allowed token if there is
    only one. The mask and the forced token are computed on demand by the matcher of the text.
    """

    __slots__ = ("children", "forced_token", "is_live", "mask", "matcher", "parent", "token")

    def __init__(
        self, parent: Optional["FormatState"], token: int, live: bool, matcher: Optional["LLMatcher"] = None
    ) -> None:
        self.parent, self.token, self.is_live = parent, token, live
        self.matcher = matcher
        self.children = dict[int, FormatState]()
        self.mask: Mask | None = None
        self.forced_token: int | None = None


class ConstraintRule(LogitsRule):
    """Rule that constrains the format of an answer, and that can be queried during tree growth."""

    needs_paths = True
    may_mask_tokens = True

    def allows_path(self, path: Sequence[int]) -> bool:
        """Return whether all tokens of a path are allowed; the last one may end the answer."""
        raise NotImplementedError

    def forced_tokens(self, path: Sequence[int], most: int) -> list[int]:
        """Return up to `most` tokens after a path, each the only one that the target can choose."""
        raise NotImplementedError


class FormatRule(ConstraintRule):
    """Rule that masks tokens after which the answer could not match its format any more.

    Tokens that end an answer are allowed only when it may end.
    """

    def __init__(
        self,
        matcher: "LLMatcher",
        vocab_size: int,
        known: int,
        ends: Collection[int],
        device: torch.device | str = "cpu",
    ) -> None:
        """
        Args:
            matcher: Matcher at the beginning of the answer; it is not advanced.
            vocab_size: V of the model.
            known: Size of the matcher's vocabulary. Other tokens of the model are masked.
            ends: Tokens that end the answer.
            device: Device of the scores.
        """
        self._size, self._ends = vocab_size, frozenset(ends)
        bits = np.zeros(-(-vocab_size // 8) * 8, np.bool_)
        bits[: min(known, vocab_size)] = True
        self._known: Mask = np.packbits(bits, bitorder="little")
        self._bits = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device)
        self._root = FormatState(None, -1, True, matcher)

    def apply(self, scores: Tensor, paths: Sequence[Sequence[int]]) -> None:
        masks = np.stack([self.mask(self._state(path)) for path in paths])  # [W, B]
        scores.masked_fill_(self.disallowed(masks, scores.device), -torch.inf)

    def disallowed(self, masks: Mask, device: torch.device) -> Tensor:
        """Return masked tokens [W, V] bool on a device from masks [W, B], which are copied as bits."""
        if device.type == "cpu":
            bits = np.unpackbits(~masks, axis=1, count=self._size, bitorder="little")
            return torch.from_numpy(bits).view(torch.bool)
        (packed,) = upload([masks], device)
        closed = packed[:, :, None].bitwise_and(self._bits) == 0  # [W, B, 8]
        return closed.view(len(masks), -1)[:, : self._size]

    def commit(self, tokens: Sequence[int]) -> None:
        self.move(self._state(tokens))

    def allows_path(self, path: Sequence[int]) -> bool:
        state = self._state(path)
        return state.is_live or (state.token in self._ends and self._may_follow(state))

    def forced_tokens(self, path: Sequence[int], most: int) -> list[int]:
        return self.forced_from(self._state(path), most)

    @property
    def root(self) -> FormatState:
        """State of the committed text."""
        return self._root

    def move(self, root: FormatState) -> None:
        """Commit the text of a state."""
        if root.is_live:
            self._matcher(root)
        root.parent = None
        self._root = root

    def is_complete(self, state: FormatState) -> bool:
        """Return whether only the end of the answer may follow."""
        if not state.is_live:
            return False
        left = int(np.bitwise_count(self.mask(state)).sum())
        return left == sum(self.allows(state, end) for end in self._ends)

    def forced_from(self, state: FormatState, most: int) -> list[int]:
        """Return up to `most` forced tokens after a state."""
        found = list[int]()
        while len(found) < most and state.is_live:
            self.mask(state)
            if state.forced_token is None:
                break
            found.append(state.forced_token)
            state = self.child(state, state.forced_token)
        return found

    def _state(self, path: Sequence[int]) -> FormatState:
        state = self._root
        for token in path:
            state = self.child(state, token)
        return state

    def child(self, state: FormatState, token: int) -> FormatState:
        """Return the state after one more token."""
        found = state.children.get(token)
        if found is None:
            live = state.is_live and token not in self._ends and self.allows(state, token)
            found = state.children[token] = FormatState(state, token, live)
        return found

    def _may_follow(self, state: FormatState) -> bool:
        return state.parent is not None and state.parent.is_live and self.allows(state.parent, state.token)

    def allows(self, state: FormatState, token: int) -> bool:
        """Return whether a token may follow a state."""
        return 0 <= token < self._size and bool(self.mask(state)[token >> 3] >> (token & 7) & 1)

    def mask(self, state: FormatState) -> Mask:
        """Return the mask [B] of allowed tokens; empty after an end or after a disallowed text."""
        if state.mask is None:
            state.mask = np.zeros_like(self._known)
            if state.is_live:
                matcher = self._matcher(state)
                given = np.frombuffer(matcher.compute_bitmask(), np.uint8)[: len(state.mask)]
                _check(matcher)
                state.mask[: len(given)] = given
                state.mask &= self._known
                if int(np.bitwise_count(state.mask).sum()) == 1:
                    byte = int(state.mask.argmax())
                    state.forced_token = 8 * byte + int(state.mask[byte]).bit_length() - 1
        return state.mask

    def _matcher(self, state: FormatState) -> "LLMatcher":
        """Return the matcher of a live state: a copy of its parent's matcher, advanced by one token.

        A copy takes one or two microseconds. Rolling a matcher back instead is not reliable: with llguidance
        1.9 it then allowed other tokens than a matcher that had read the same text directly.
        """
        if state.matcher is None:
            assert state.parent is not None
            matcher = self._matcher(state.parent).deep_copy()
            taken = matcher.try_consume_tokens([state.token])
            _check(matcher)
            assert taken == 1, "the matcher must accept every token that its mask allows"
            state.matcher = matcher
        return state.matcher


def _check(matcher: "LLMatcher") -> None:
    """Raise RequestError if a matcher has failed."""
    if matcher.is_error():
        reason = " ".join(matcher.get_error().split("<state>")[0].split())[:200]
        raise RequestError(f"the format became too complex to follow: {reason}; simplify it")
