"""Drawing of a verified tree as lines of text: draft tokens, probabilities, and the accepted path.

The accepted path runs straight down a heavy line, and rejected draft tokens branch off to the right. A row
without a branch continues the row above it in its column. Signs repeat the meaning of the colours:

    ●  accepted    ○  rejected    ★  bonus: the target's own token    ▸  folded
"""

import unicodedata
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rich.cells import cell_len, set_cell_size

from offspec.core.events import TreeSeen
from offspec_planners.units import format_count

SpanStyle = Literal["plain", "accepted", "rejected", "probability", "branch", "bonus"]

HEADING = "depth  chance  token"
_FEW = 2  # rejected tokens with their own line at each step of the path while folded
_LONGEST = 40  # maximum cells of a token
_SIGNS: dict[bool, tuple[str, SpanStyle]] = {True: ("●", "accepted"), False: ("○", "rejected")}
_SPELLED = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}


class Span(NamedTuple):
    """Text in one style."""

    text: str
    style: SpanStyle


Line = list[Span]


class _Row(NamedTuple):
    """Node to draw, with the branches left of its sign and left of the rows below it."""

    node: int
    left: str
    below: str


def caption(tree: TreeSeen, place: int, count: int) -> str:
    """Describe the tree in a sentence; it is number `place` of `count`, from 1.

    The number of tokens that the draft expected is the sum of all path probabilities; the root's is the
    bonus token.
    """
    accepted = len(tree.accepted) - 1
    bonus = " + 1 bonus" if tree.bonus else ", end of the answer"
    nodes = f"{format_count(len(tree.parent), 'node')}, {accepted} accepted{bonus}"
    return f"pass {place:,} of {count:,}: {nodes}; expected by the draft: {sum(tree.probability):.1f}"


def draw(tree: TreeSeen, *, folded: bool = True) -> list[Line]:
    """Draw the tree with one line per node, and the bonus token at the end of the path.

    folded: whether to show only the most likely rejected tokens, and numbers of the others.
    """
    drawing = _Drawing.of(tree, folded)
    lines: list[Line] = []
    waiting: list[_Row | Line] = [_Row(0, "", "")]
    while waiting:
        row = waiting.pop()
        if isinstance(row, _Row):
            lines.append(drawing.line(row))
            waiting += reversed(drawing.lines_below(row))
        else:
            lines.append(row)
    return lines


@dataclass(frozen=True, slots=True)
class _Drawing:
    """Tree with derived data for drawing.

    children: children of each node, most likely first. depth: depth of each node. size: nodes in the subtree
    of each node, including itself.
    """

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
        for node in range(count - 1, 0, -1):  # parents precede their children
            size[tree.parent[node]] += size[node]
        for siblings in children:
            siblings.sort(key=lambda node: -tree.probability[node])
        return cls(tree, folded, frozenset(tree.accepted), children, depth, size)

    def line(self, row: _Row) -> Line:
        """Draw the line of a node, with the number of nodes folded below it."""
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

    def lines_below(self, row: _Row) -> list[_Row | Line]:
        """Return the rows below a node from the top: branches, the folded rest, and the continuation."""
        node, accepted = row.node, row.node in self.path
        if self.folded and not accepted:
            return []
        onward = self._main_child(node)
        beside = [child for child in self.children[node] if child != onward]
        # With exactly one more than _FEW, show it too: a line that counts it would be as long.
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

    def _main_child(self, node: int) -> int | None:
        """Return the child that continues a node's column: the accepted or the most likely rejected one."""
        children = self.children[node]
        if node in self.path:
            return next((child for child in children if child in self.path), None)
        return children[0] if children else None

    def _folded(self, row: _Row, rest: list[int]) -> Line:
        nodes = sum(self.size[child] for child in rest)
        more = f"{len(rest):,} more {'token' if len(rest) == 1 else 'tokens'}"
        inside = f", {nodes:,} nodes" if nodes > len(rest) else ""
        likeliest = percent(self.tree.probability[rest[0]])
        return [
            *_margin(self.depth[row.node] + 1, f"≤{likeliest}"),
            *_branches(f"{row.below}├─"),
            Span(f"▸ {more}{inside}", "branch"),
        ]


def _margin(depth: int, chance: str) -> Line:
    return [Span(f"{depth:>5}  ", "branch"), Span(f"{chance:>6}  ", "probability")]


def _branches(left: str) -> Line:
    """Return the lines left of a node; the outermost is the accepted path."""
    if not left:
        return []
    return [Span("┠" if left[0] == "├" else "┃", "accepted"), Span(left[1:], "branch")]


def percent(probability: float) -> str:
    """Format a probability: 0.8312 as "83%", 0.0312 as "3.1%", and smaller ones as "0.0%"."""
    share = 100 * min(max(probability, 0.0), 1.0)
    return f"{share:.0f}%" if share >= 9.95 else f"{share:.1f}%"


def visible(text: str) -> str:
    """Return a token's text on one line, with signs for spaces, line ends, controls and lone marks."""
    if not text:
        return "(no text)"
    signs = "".join(_visible_character(character, first=place == 0) for place, character in enumerate(text))
    return signs if cell_len(signs) <= _LONGEST else f"{set_cell_size(signs, _LONGEST - 1)}…"


def _visible_character(character: str, *, first: bool) -> str:
    """Return a character, spelled out if a terminal would execute, hide or combine it."""
    if character in _SPELLED:
        return _SPELLED[character]
    category = unicodedata.category(character)
    if category[0] in "CZ" or "\ufe00" <= character <= "\ufe0f":
        return character.encode("unicode_escape").decode("ascii")
    return f"◌{character}" if first and category in ("Mn", "Me") else character
