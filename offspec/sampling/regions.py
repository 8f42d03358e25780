"""Formats of parts of an answer: a call of a tool from its opening mark on, or the text after reasoning.

Outside of regions nothing is closed but tokens that hold the end of a mark and more, so that each region
begins between two tokens. Where a mark is complete, a `FormatRule` of its own follows the region's grammar.

Letters: V vocabulary, W nodes.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
import torch
from torch import Tensor

from offspec.core.constraint import Region, Regions
from offspec.sampling.constraint import Format, FormatRule, State
from offspec_kernels.transfer import upload

Rules = Callable[[str], FormatRule]  # a rule at the beginning of a grammar in Lark
Beyond = Callable[[str], Sequence[int]]  # tokens that begin with a text; those that go on are among them


class _Stage(Enum):
    BEGINNING = auto()  # reasoning, or a region of the beginning, may still come
    THOUGHT = auto()
    TEXT = auto()
    REGION = auto()
    DEAD = auto()  # after the end of an answer, or after a token that is closed


@dataclass(eq=False, slots=True)
class _Node:
    """An answer so far, by its tokens.

    depth: its tokens. tail: its latest bytes outside of regions. rule, state: of the region that it ends in.
    closed: tokens that may not follow it outside of regions, found when they are asked for.
    """

    depth: int
    stage: _Stage
    tail: bytes = b""
    rule: FormatRule | None = None
    state: State | None = None
    closed: tuple[int, ...] | None = None
    below: dict[int, "_Node"] = field(default_factory=dict)


class RegionRule(Format):
    """Gives some parts of an answer a format."""

    def __init__(
        self,
        regions: Regions,
        rules: Rules,
        beyond: Beyond,
        token_bytes: Callable[[int], bytes],
        ends: Collection[int],
    ) -> None:
        """
        Args:
            regions: Where formats begin.
            rules: Makes the rule of a grammar.
            beyond: Finds the tokens that begin with a text.
            token_bytes: What a token stands for, in UTF-8; of a special token its name.
            ends: Tokens that end the answer.
        """
        self._given, self._rules, self._beyond = regions, rules, beyond
        self._bytes, self._ends = token_bytes, frozenset(ends)
        self._regions = [(region.mark.encode(), region) for region in regions.regions]
        self._begins, self._finishes = (mark.encode() for mark in regions.thought or ("", ""))
        starts = [mark for mark, region in self._regions if region.at_start]
        self._starts = [mark for mark in (self._begins, *starts) if mark]
        self._longest = max(map(len, (self._finishes, *(mark for mark, _ in self._regions))))
        self._overruns = dict[bytes, tuple[int, ...]]()
        if regions.thinking:
            self._root = self._settled(0, _Stage.THOUGHT, b"")
        elif regions.required:
            self._root = self._region(0, regions.required)
        else:
            self._root = _Node(0, _Stage.BEGINNING)

    def apply(self, scores: Tensor, paths: Sequence[Sequence[int]]) -> None:
        nodes = [self._node(path) for path in paths]
        rows = [at for at, node in enumerate(nodes) if node.stage is _Stage.REGION]
        if rows:
            states = [_place(nodes[at]) for at in rows]
            masks = np.stack([rule.mask(state) for rule, state in states])
            places = torch.tensor(rows, device=scores.device)
            closed = states[0][0].closed(masks, scores.device)
            scores[places] = scores[places].masked_fill(closed, -torch.inf)
        if dead := [at for at, node in enumerate(nodes) if node.stage is _Stage.DEAD]:
            scores[torch.tensor(dead, device=scores.device)] = -torch.inf
        pairs = [(at, token) for at, node in enumerate(nodes) for token in self._closed(node)]
        if pairs:
            (found,) = upload([np.array(pairs, np.int64)], scores.device)
            scores[found[:, 0], found[:, 1]] = -torch.inf

    def commit(self, tokens: Sequence[int]) -> None:
        self._root = self._node(tokens)
        if self._root.stage is _Stage.REGION:
            rule, state = _place(self._root)
            rule.move(state)

    def fits(self, path: Sequence[int]) -> bool:
        node = self._root
        for at, token in enumerate(path):
            if not self._opens(node, token):
                return False
            if token in self._ends:
                return at == len(path) - 1
            node = self._below(node, token)
        return True

    def forced(self, path: Sequence[int], most: int) -> list[int]:
        node, found = self._node(path), list[int]()
        while len(found) < most and node.stage is _Stage.REGION:
            rule, state = _place(node)
            if not (following := rule.forced_from(state, 1)):
                break
            found += following
            node = self._below(node, following[0])
        return found

    def _opens(self, node: _Node, token: int) -> bool:
        if node.stage is _Stage.REGION:
            rule, state = _place(node)
            return rule.allows(state, token)
        return node.stage is not _Stage.DEAD and token not in self._closed(node)

    def _node(self, path: Sequence[int]) -> _Node:
        node = self._root
        for token in path:
            node = self._below(node, token)
        return node

    def _below(self, node: _Node, token: int) -> _Node:
        found = node.below.get(token)
        if found is None:
            found = node.below[token] = self._after(node, token)
        return found

    def _after(self, node: _Node, token: int) -> _Node:
        depth = node.depth + 1
        if token in self._ends or not self._opens(node, token):
            return _Node(depth, _Stage.DEAD)
        if node.stage is not _Stage.REGION:
            return self._settled(depth, node.stage, node.tail + self._bytes(token))
        rule, state = _place(node)
        state = rule.below(state, token)
        if rule.complete(state) and not self._given.required:
            return _Node(depth, _Stage.TEXT)
        return _Node(depth, _Stage.REGION, b"", rule, state)

    def _settled(self, depth: int, stage: _Stage, tail: bytes) -> _Node:
        """The answer in the stage that it reaches with its latest bytes."""
        given = self._given
        if stage is _Stage.BEGINNING:
            text = tail.strip()
            if self._begins and text.startswith(self._begins):
                stage, tail = _Stage.THOUGHT, text[len(self._begins) :]
            elif text and not any(mark.startswith(text) for mark in self._starts):
                stage = _Stage.TEXT
        if stage is _Stage.THOUGHT:
            _, found, rest = tail.partition(self._finishes)
            if found and given.required:
                return self._region(depth, given.required)
            if not found and given.cut and depth == given.thought_tokens:
                return self._region(depth, given.cut)
            if not found:
                return _Node(depth, stage, tail[-self._longest :])
            stage, tail = _Stage.TEXT, rest
        for mark, region in self._sought(stage):
            if tail.endswith(mark) and (not region.at_start or tail.strip() == mark):
                return self._region(depth, region.grammar)
        return _Node(depth, stage, tail if stage is _Stage.BEGINNING else tail[-self._longest - 1 :])

    def _region(self, depth: int, grammar: str) -> _Node:
        rule = self._rules(grammar)
        return _Node(depth, _Stage.REGION, b"", rule, rule.root)

    def _closed(self, node: _Node) -> tuple[int, ...]:
        """The tokens that may not follow an answer so far, if it does not end in a region."""
        if node.closed is None:
            found = tuple[int, ...]()
            if node.stage is _Stage.THOUGHT and self._given.required:
                found = (*self._ends, *self._overrun(node.tail, self._finishes))
            elif node.stage in (_Stage.BEGINNING, _Stage.TEXT):
                marks = [mark for mark, _ in self._sought(node.stage)]
                found = tuple(token for mark in marks for token in self._overrun(node.tail, mark))
            node.closed = found
        return node.closed

    def _sought(self, stage: _Stage) -> list[tuple[bytes, Region]]:
        """The regions that may begin, each with its mark."""
        begins = stage is _Stage.BEGINNING
        return [(mark, region) for mark, region in self._regions if begins or not region.at_start]

    def _overrun(self, tail: bytes, mark: bytes) -> tuple[int, ...]:
        """The tokens with which a tail has a whole mark and more after it."""
        found = self._longer(mark)
        for length in range(1, len(mark)):
            if tail.endswith(mark[:length]):
                found += self._longer(mark[length:])
        return found

    def _longer(self, rest: bytes) -> tuple[int, ...]:
        """The tokens that begin with some bytes and go on."""
        if rest not in self._overruns:
            try:
                given = self._beyond(rest.decode())
            except UnicodeDecodeError:  # cut within a character of a mark
                given = ()
            spelt = ((token, self._bytes(token)) for token in given)
            longer = (token for token, text in spelt if text.startswith(rest) and text != rest)
            self._overruns[rest] = tuple(longer)
        return self._overruns[rest]


def _place(node: _Node) -> tuple[FormatRule, State]:
    """The region that an answer so far ends in, and the place there."""
    assert node.rule is not None and node.state is not None
    return node.rule, node.state
