"""The format of an answer as a rule: at each node only tokens with which the text can still come to have it.

A mask of 49,152 tokens takes some 40 µs, and is asked for by drafters, by the growth of the tree, by the
target. So states are kept in a tree of their own, by the tokens below the committed text, with their masks.

Letters: V vocabulary, B its bytes as bits, W nodes.
"""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Optional

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offspec.core.errors import RequestError
from offspec.sampling.rules import Rule
from offspec_kernels.transfer import upload

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask = NDArray[np.uint8]


class State:
    """An answer so far, by its last token, and what the format allows after it.

    token: the last of the text. live: whether the text can come at all, and does not end the answer. mask:
    [B] uint8, bit t % 8 of byte t // 8 for the token t; only: the token that may follow, if it is one alone.
    Both are found when they are asked for, by the matcher of the text.
    """

    __slots__ = ("below", "live", "mask", "matcher", "only", "parent", "token")

    def __init__(
        self, parent: Optional["State"], token: int, live: bool, matcher: Optional["LLMatcher"] = None
    ) -> None:
        self.parent, self.token, self.live = parent, token, live
        self.matcher = matcher
        self.below = dict[int, State]()
        self.mask: Mask | None = None
        self.only: int | None = None


class Format(Rule):
    """A rule that gives an answer its format, and that growing trees asks ahead."""

    needs_paths = True
    closes = True

    def fits(self, path: Sequence[int]) -> bool:
        """Whether the tokens of a path may all come, the last of them as the last of an answer, too."""
        raise NotImplementedError

    def forced(self, path: Sequence[int], most: int) -> list[int]:
        """The tokens behind a path of which each is the only one that may come there: so many at most.

        The target can choose no others.
        """
        raise NotImplementedError


class FormatRule(Format):
    """Closes the tokens with which an answer could no longer have its format.

    Tokens that end an answer are open exactly where it may end.
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
            matcher: At the beginning of the answer; it stays there.
            vocab_size: V of the model.
            known: Tokens of the matcher's vocabulary. Those that only the model has are closed.
            ends: Tokens that end the answer.
            device: Of the scores.
        """
        self._size, self._ends = vocab_size, frozenset(ends)
        bits = np.zeros(-(-vocab_size // 8) * 8, np.bool_)
        bits[: min(known, vocab_size)] = True
        self._known: Mask = np.packbits(bits, bitorder="little")
        self._bits = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device)
        self._root = State(None, -1, True, matcher)

    def apply(self, scores: Tensor, paths: Sequence[Sequence[int]]) -> None:
        masks = np.stack([self.mask(self._state(path)) for path in paths])  # [W, B]
        scores.masked_fill_(self.closed(masks, scores.device), -torch.inf)

    def closed(self, masks: Mask, device: torch.device) -> Tensor:
        """[W, V] bool on a device, from masks [W, B]; eight tokens a byte go there."""
        if device.type == "cpu":
            bits = np.unpackbits(~masks, axis=1, count=self._size, bitorder="little")
            return torch.from_numpy(bits).view(torch.bool)
        (packed,) = upload([masks], device)
        closed = packed[:, :, None].bitwise_and(self._bits) == 0  # [W, B, 8]
        return closed.view(len(masks), -1)[:, : self._size]

    def commit(self, tokens: Sequence[int]) -> None:
        self.move(self._state(tokens))

    def fits(self, path: Sequence[int]) -> bool:
        state = self._state(path)
        return state.live or (state.token in self._ends and self._may_follow(state))

    def forced(self, path: Sequence[int], most: int) -> list[int]:
        return self.forced_from(self._state(path), most)

    @property
    def root(self) -> State:
        """The state of the committed text."""
        return self._root

    def move(self, root: State) -> None:
        """Commit the text of a state."""
        if root.live:
            self._matcher(root)
        root.parent = None
        self._root = root

    def complete(self, state: State) -> bool:
        """Whether nothing but the end of the answer may follow."""
        if not state.live:
            return False
        left = int(np.bitwise_count(self.mask(state)).sum())
        return left == sum(self.allows(state, end) for end in self._ends)

    def forced_from(self, state: State, most: int) -> list[int]:
        """See `forced`."""
        found = list[int]()
        while len(found) < most and state.live:
            self.mask(state)
            if state.only is None:
                break
            found.append(state.only)
            state = self.below(state, state.only)
        return found

    def _state(self, path: Sequence[int]) -> State:
        state = self._root
        for token in path:
            state = self.below(state, token)
        return state

    def below(self, state: State, token: int) -> State:
        """The state behind one more token."""
        found = state.below.get(token)
        if found is None:
            live = state.live and token not in self._ends and self.allows(state, token)
            found = state.below[token] = State(state, token, live)
        return found

    def _may_follow(self, state: State) -> bool:
        return state.parent is not None and state.parent.live and self.allows(state.parent, state.token)

    def allows(self, state: State, token: int) -> bool:
        """Whether a token may follow a state."""
        return 0 <= token < self._size and bool(self.mask(state)[token >> 3] >> (token & 7) & 1)

    def mask(self, state: State) -> Mask:
        """[B]: what may follow; nothing behind an end, or behind what cannot come."""
        if state.mask is None:
            state.mask = np.zeros_like(self._known)
            if state.live:
                matcher = self._matcher(state)
                given = np.frombuffer(matcher.compute_bitmask(), np.uint8)[: len(state.mask)]
                _check(matcher)
                state.mask[: len(given)] = given
                state.mask &= self._known
                if int(np.bitwise_count(state.mask).sum()) == 1:
                    byte = int(state.mask.argmax())
                    state.only = 8 * byte + int(state.mask[byte]).bit_length() - 1
        return state.mask

    def _matcher(self, state: State) -> "LLMatcher":
        """The matcher of a live state: a copy of that of its parent, one token further.

        A copy takes a microsecond or two. A matcher that takes tokens back has allowed others afterwards than
        one that read the text at once (llguidance 1.9).
        """
        if state.matcher is None:
            assert state.parent is not None
            matcher = self._matcher(state.parent).deep_copy()
            taken = matcher.try_consume_tokens([state.token])
            _check(matcher)
            assert taken == 1, "a mask opens no token that the matcher does not take"
            state.matcher = matcher
        return state.matcher


def _check(matcher: "LLMatcher") -> None:
    """Raises RequestError if a matcher has given up."""
    if matcher.is_error():
        reason = " ".join(matcher.get_error().split("<state>")[0].split())[:200]
        raise RequestError(f"the format became too complex to follow: {reason}; simplify it")
