"""A verified tree as lines of text: draft tokens, their probabilities, and what the target accepted.

The accepted path runs straight down a heavy line, and rejected guesses branch off it to the right. A row
without a branch goes on from the row above it in its column. Signs tell what colours tell:

    ●  accepted    ○  rejected    ★  bonus: the target's own token    ▸  folded away
"""

import unicodedata
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rich.cells import cell_len, set_cell_size

from offspec.core.events import TreeSeen
from offspec_planners.units import format_count

SpanStyle = Literal["plain", "accepted", "rejected", "probability", "branch", "bonus"]

HEADING = "depth  chance  token"
_FEW = 2  # rejected guesses beside a step of the path that have a line of their own while folded
_LONGEST = 40  # cells of a token
_SIGNS: dict[bool, tuple[str, SpanStyle]] = {True: ("●", "accepted"), False: ("○", "rejected")}
_SPELLED = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}


class Span(NamedTuple):
    """Text of one look."""

    text: str
    style: SpanStyle


Line = list[Span]


class _Row(NamedTuple):
    """A node to draw: the branches left of its sign, and those left of what continues below it."""

    node: int
    left: str
    below: str


def caption(tree: TreeSeen, place: int, count: int) -> str:
    """The tree in a sentence; it is number `place` of `count`, from 1.

    The tokens that the draft expected are the sum of the paths' probabilities; the root's is the bonus.
    """
    guessed = len(tree.accepted) - 1
    bonus = " + 1 bonus" if tree.bonus else ", with which the answer ended"
    nodes = f"{format_count(len(tree.parent), 'node')}, {guessed} accepted{bonus}"
    return f"pass {place:,} of {count:,}: {nodes}; the draft expected {sum(tree.probability):.1f}"


def draw(tree: TreeSeen, *, folded: bool = True) -> list[Line]:
    """The tree, a line for each node, and the bonus token at the end of the path.

    folded: what was rejected has a line for each of the likeliest draft tokens, and counts of the others.
    """
    drawing = _Drawing.of(tree, folded)
    lines: list[Line] = []
    waiting: list[_Row | Line] = [_Row(0, "", "")]
    while waiting:
        row = waiting.pop()
        if isinstance(row, _Row):
            lines.append(drawing.line(row))
            waiting += reversed(drawing.under(row))
        else:
            lines.append(row)
    return lines


@dataclass(frozen=True, slots=True)
class _Drawing:
    """children: of each node, the likeliest first; size: nodes from a node down, itself included."""

    tree: TreeSeen
    folded: bool
    path: frozenset[int]
    children: tuple[list[int], ...]
    depth: list[int]
    size: list[int]

    @classmethod
    def of(cls, tree: TreeSeen, folded: bool) -> "_Drawing":
        count = len(tree.parent)
        children: tuple[list[int], ...] = tuple([] for _ in range(count))
        depth, size = [0] * count, [1] * count
        for node in range(1, count):
            children[tree.parent[node]].append(node)
            depth[node] = depth[tree.parent[node]] + 1
        for node in range(count - 1, 0, -1):  # a parent stands before its children
            size[tree.parent[node]] += size[node]
        for siblings in children:
            siblings.sort(key=lambda node: -tree.probability[node])
        return cls(tree, folded, frozenset(tree.accepted), children, depth, size)

    def line(self, row: _Row) -> Line:
        """A node's own line; what is folded below it is counted there."""
        accepted = row.node in self.path
        sign, style = _SIGNS[accepted]
        spans = [
            *_margin(self.depth[row.node], percent(self.tree.probability[row.node])),
            *_branches(row.left),
            Span(f"{sign} {visible(self.tree.text[row.node])}", style),
        ]
        hidden = self.size[row.node] - 1
        if self.folded and not accepted and hidden:
            spans.append(Span(f"  ▸ {hidden:,} more", "branch"))
        return spans

    def under(self, row: _Row) -> list[_Row | Line]:
        """What comes below a node's line, from the top: branches, what is folded, and what continues it."""
        node, accepted = row.node, row.node in self.path
        if self.folded and not accepted:
            return []
        onward = self._onward(node)
        beside = [child for child in self.children[node] if child != onward]
        # One guess more than a few has a line of its own as well: so has the line that would count it.
        shown = beside[:_FEW] if self.folded and len(beside) > _FEW + 1 else beside
        rows: list[_Row | Line] = [_Row(child, f"{row.below}├─", f"{row.below}│ ") for child in shown]
        if rest := beside[len(shown) :]:
            rows.append(self._folded(row, rest))
        if onward is not None:
            rows.append(_Row(onward, row.below, row.below))
        elif accepted and self.tree.bonus:
            star = Span(f"★ {visible(self.tree.bonus)}", "bonus")
            rows.append([*_margin(self.depth[node] + 1, "bonus"), star])
        return rows

    def _onward(self, node: int) -> int | None:
        """The child that continues a node's column: the accepted one, or of rejected ones the likeliest."""
        children = self.children[node]
        if node in self.path:
            return next((child for child in children if child in self.path), None)
        return children[0] if children else None

    def _folded(self, row: _Row, rest: list[int]) -> Line:
        nodes = sum(self.size[child] for child in rest)
        guesses = f"{len(rest):,} more {'guess' if len(rest) == 1 else 'guesses'}"
        inside = f", {nodes:,} nodes" if nodes > len(rest) else ""
        likeliest = percent(self.tree.probability[rest[0]])
        return [
            *_margin(self.depth[row.node] + 1, f"≤{likeliest}"),
            *_branches(f"{row.below}├─"),
            Span(f"▸ {guesses}{inside}", "branch"),
        ]


def _margin(depth: int, chance: str) -> Line:
    return [Span(f"{depth:>5}  ", "branch"), Span(f"{chance:>6}  ", "probability")]


def _branches(left: str) -> Line:
    """The lines left of a node; the outermost is the accepted path itself."""
    if not left:
        return []
    return [Span("┠" if left[0] == "├" else "┃", "accepted"), Span(left[1:], "branch")]


def percent(probability: float) -> str:
    """0.8312 as "83%", 0.0312 as "3.1%", and "0.0%" for whatever is below."""
    share = 100 * min(max(probability, 0.0), 1.0)
    return f"{share:.0f}%" if share >= 9.95 else f"{share:.1f}%"


def visible(text: str) -> str:
    """A token's text in signs that stay in their line; so do spaces, line ends, controls and lone marks."""
    if not text:
        return "(no text)"
    signs = "".join(_sign(character, first=place == 0) for place, character in enumerate(text))
    return signs if cell_len(signs) <= _LONGEST else f"{set_cell_size(signs, _LONGEST - 1)}…"


def _sign(character: str, *, first: bool) -> str:
    """One character. What a terminal would obey, hide or join to its neighbour is spelled out."""
    if character in _SPELLED:
        return _SPELLED[character]
    category = unicodedata.category(character)
    if category[0] in "CZ" or "\ufe00" <= character <= "\ufe0f":
        return character.encode("unicode_escape").decode("ascii")
    return f"◌{character}" if first and category in ("Mn", "Me") else character
