"""Constraints on parts of an answer: a tool call after its opening mark, or the text after reasoning.

Outside of regions only tokens that contain the end of a mark and more text are masked, so that each region
begins at a token boundary. After a complete mark, a separate `FormatRule` follows the region's grammar.

Letters: V vocabulary, W nodes.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
import torch
from torch import Tensor

from offspec.core.constraint import Region, Regions
from offspec.sampling.format_rule import ConstraintRule, FormatRule, FormatState
from offspec_kernels.transfer import upload

Rules = Callable[[str], FormatRule]  # creates the rule of a Lark grammar
Beyond = Callable[[str], Sequence[int]]  # tokens that may extend a text


class _Stage(Enum):
    BEGINNING = auto()  # reasoning, or a region at the start, may still begin
    THOUGHT = auto()
    TEXT = auto()
    REGION = auto()
    DEAD = auto()  # after the end of an answer, or after a masked token


@dataclass(eq=False, slots=True)
class _Node:
    """State after a sequence of answer tokens.

    depth: number of tokens. tail: latest bytes outside of regions. rule, state: those of the region in which
    the sequence ends. masked: tokens that may not follow outside of regions, computed on demand.
    """

    depth: int
    stage: _Stage
    tail: bytes = b""
    rule: FormatRule | None = None
    state: FormatState | None = None
    masked: tuple[int, ...] | None = None
    children: dict[int, "_Node"] = field(default_factory=dict)


class RegionRule(ConstraintRule):
    """Rule that constrains some parts of an answer."""

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
            regions: Constrained regions.
            rules: Creates the rule of a grammar.
            beyond: Returns the tokens that may extend a text.
            token_bytes: Returns a token's text in UTF-8, or the name of a special token.
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
            self._root = self._resolve_stage(0, _Stage.THOUGHT, b"")
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
            closed = states[0][0].disallowed(masks, scores.device)
            scores[places] = scores[places].masked_fill(closed, -torch.inf)
        if dead := [at for at, node in enumerate(nodes) if node.stage is _Stage.DEAD]:
            scores[torch.tensor(dead, device=scores.device)] = -torch.inf
        pairs = [(at, token) for at, node in enumerate(nodes) for token in self._masked(node)]
        if pairs:
            (found,) = upload([np.array(pairs, np.int64)], scores.device)
            scores[found[:, 0], found[:, 1]] = -torch.inf

    def commit(self, tokens: Sequence[int]) -> None:
        self._root = self._node(tokens)
        if self._root.stage is _Stage.REGION:
            rule, state = _place(self._root)
            rule.move(state)

    def allows_path(self, path: Sequence[int]) -> bool:
        node = self._root
        for at, token in enumerate(path):
            if not self._opens(node, token):
                return False
            if token in self._ends:
                return at == len(path) - 1
            node = self._child(node, token)
        return True

    def forced_tokens(self, path: Sequence[int], most: int) -> list[int]:
        node, found = self._node(path), list[int]()
        while len(found) < most and node.stage is _Stage.REGION:
            rule, state = _place(node)
            if not (following := rule.forced_from(state, 1)):
                break
            found += following
            node = self._child(node, following[0])
        return found

    def _opens(self, node: _Node, token: int) -> bool:
        if node.stage is _Stage.REGION:
            rule, state = _place(node)
            return rule.allows(state, token)
        return node.stage is not _Stage.DEAD and token not in self._masked(node)

    def _node(self, path: Sequence[int]) -> _Node:
        node = self._root
        for token in path:
            node = self._child(node, token)
        return node

    def _child(self, node: _Node, token: int) -> _Node:
        found = node.children.get(token)
        if found is None:
            found = node.children[token] = self._after(node, token)
        return found

    def _after(self, node: _Node, token: int) -> _Node:
        depth = node.depth + 1
        if token in self._ends or not self._opens(node, token):
            return _Node(depth, _Stage.DEAD)
        if node.stage is not _Stage.REGION:
            return self._resolve_stage(depth, node.stage, node.tail + self._bytes(token))
        rule, state = _place(node)
        state = rule.child(state, token)
        if rule.is_complete(state) and not self._given.required:
            return _Node(depth, _Stage.TEXT)
        return _Node(depth, _Stage.REGION, b"", rule, state)

    def _resolve_stage(self, depth: int, stage: _Stage, tail: bytes) -> _Node:
        """Return the node of the stage that the latest bytes lead to."""
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

    def _masked(self, node: _Node) -> tuple[int, ...]:
        """Return the tokens that may not follow a node outside of regions."""
        if node.masked is None:
            found = tuple[int, ...]()
            if node.stage is _Stage.THOUGHT and self._given.required:
                found = (*self._ends, *self._overrunning(node.tail, self._finishes))
            elif node.stage in (_Stage.BEGINNING, _Stage.TEXT):
                marks = [mark for mark, _ in self._sought(node.stage)]
                found = tuple(token for mark in marks for token in self._overrunning(node.tail, mark))
            node.masked = found
        return node.masked

    def _sought(self, stage: _Stage) -> list[tuple[bytes, Region]]:
        """Return the regions that may begin, each with its mark."""
        begins = stage is _Stage.BEGINNING
        return [(mark, region) for mark, region in self._regions if begins or not region.at_start]

    def _overrunning(self, tail: bytes, mark: bytes) -> tuple[int, ...]:
        """Return the tokens that complete a mark at the end of a tail and add more text."""
        found = self._longer(mark)
        for length in range(1, len(mark)):
            if tail.endswith(mark[:length]):
                found += self._longer(mark[length:])
        return found

    def _longer(self, rest: bytes) -> tuple[int, ...]:
        """Return the tokens that begin with `rest` and are longer."""
        if rest not in self._overruns:
            try:
                given = self._beyond(rest.decode())
            except UnicodeDecodeError:  # split within a character of a mark
                given = ()
            texts = ((token, self._bytes(token)) for token in given)
            longer = (token for token, text in texts if text.startswith(rest) and text != rest)
            self._overruns[rest] = tuple(longer)
        return self._overruns[rest]


def _place(node: _Node) -> tuple[FormatRule, FormatState]:
    """Return the rule and the state of the region in which a node ends."""
    assert node.rule is not None and node.state is not None
    return node.rule, node.state
