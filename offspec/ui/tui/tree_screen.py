"""Screen with the token trees of the latest passes. Only visible lines are painted."""

import sys
from collections.abc import Sequence
from typing import ClassVar, get_args

from rich.cells import cell_len
from rich.segment import Segment
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.geometry import Size
from textual.screen import Screen
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Footer, Static

from offspec.core.events import TreeSeen
from offspec.ui.tui.cached_text import CachedText
from offspec.ui.tui.tree_drawing import HEADING, Line, SpanStyle, caption, draw, visible

_LEGEND = "● accepted  ○ rejected  ★ bonus: the target's own  ▸ folded  · space  ⏎ line"
_NONE = "No tree yet. Ask a question; every pass adds a tree here."
_STEP = 8  # columns per key press when panning
_LOOK = 0.25  # seconds between checks for new passes


class TreeView(ScrollView, can_focus=False):
    """View of lines that scrolls both ways. The screen handles keys, since arrows also switch passes."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"tree--{style}" for style in get_args(SpanStyle)}

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._lines: Sequence[Line] = ()

    def show(self, lines: Sequence[Line]) -> None:
        """Show these lines, and keep the scroll position if possible."""
        self._lines = lines
        width = max((sum(cell_len(span.text) for span in line) for line in lines), default=0)
        self.virtual_size = Size(width, len(lines))
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Return line y of the view."""
        left, top = self.scroll_offset
        width, plain = self.size.width, self.rich_style
        if top + y >= len(self._lines):
            return Strip.blank(width, plain)
        segments = [
            Segment(span.text, self.get_component_rich_style(f"tree--{span.style}"))
            for span in self._lines[top + y]
        ]
        return Strip(segments).crop_extend(left, left + width, plain)


class TreeScreen(Screen[None]):
    """Screen with the tree of one pass and keys to switch passes. On the last pass it follows new ones."""

    CSS_PATH = "tree_screen.tcss"
    AUTO_FOCUS = ""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,ctrl+t", "dismiss", "Close", key_display="esc"),
        Binding("ctrl+c", "copy_text", show=False),  # falls through if nothing is selected
        Binding("ctrl+c", "dismiss", show=False),
        Binding("left", "turn(-1)", "Earlier pass", key_display="←"),
        Binding("right", "turn(1)", "Later pass", key_display="→"),
        Binding("space", "fold", "Fold or unfold"),
        Binding("home", "go(0)", "First pass", show=False),
        Binding("end", f"go({sys.maxsize})", "Last pass", show=False),
        Binding("up,k", "pan(0, -1)", "Up", show=False),
        Binding("down,j", "pan(0, 1)", "Down", show=False),
        Binding("h,shift+left", "pan(-1, 0)", "Left", show=False),
        Binding("l,shift+right", "pan(1, 0)", "Right", show=False),
        Binding("pageup", "leaf(-1)", "Page up", show=False),
        Binding("pagedown", "leaf(1)", "Page down", show=False),
    ]

    def __init__(self, trees: Sequence[TreeSeen], at: int = -1) -> None:
        """trees: trees of the passes so far, the oldest first; may grow. at: index of the tree to show."""
        super().__init__()
        self._source = trees
        self._trees = tuple(trees)
        self._at = range(len(self._trees))[at] if self._trees else 0
        self._folded = True

    def compose(self) -> ComposeResult:
        yield CachedText(id="tree-caption", by_width=True)
        yield Static(id="tree-said")
        yield Static(HEADING, id="tree-heading")
        yield TreeView(id="tree-view")
        yield Static(_LEGEND, id="tree-legend")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self._draw()
        self.set_interval(_LOOK, self.show_new_trees)

    def show_new_trees(self) -> None:
        """Check for new passes, and if the last one was shown, show the new last one."""
        trees = tuple(self._source)
        if trees == self._trees or not trees:
            return
        shown = self._trees[self._at] if self._trees else None
        follows = self._at >= len(self._trees) - 1
        self._trees = trees
        places = (place for place, tree in enumerate(trees) if tree is shown)
        self._at = len(trees) - 1 if follows else next(places, 0)
        self._draw()

    def _draw(self) -> None:
        view, heading = self.query_one(TreeView), self.query_one("#tree-caption", CachedText)
        if not self._trees:
            heading.show(_NONE)
            return
        tree = self._trees[self._at]
        heading.show(caption(tree, self._at + 1, len(self._trees)))
        self.query_one("#tree-said", Static).update(_outcome_line(tree), layout=False)
        view.show(draw(tree, folded=self._folded))

    def action_turn(self, passes: int) -> None:
        self.action_go(self._at + passes)

    def action_go(self, place: int) -> None:
        """Show the tree at this index, or the nearest existing one."""
        place = max(0, min(place, len(self._trees) - 1))
        if place != self._at:
            self._at = place
            self._draw()
            self.query_one(TreeView).scroll_to(0, 0, animate=False)

    def action_fold(self) -> None:
        self._folded = not self._folded
        self._draw()

    def action_pan(self, columns: int, rows: int) -> None:
        self.query_one(TreeView).scroll_relative(columns * _STEP, rows, animate=False)

    def action_leaf(self, pages: int) -> None:
        view = self.query_one(TreeView)
        view.scroll_relative(0, pages * max(view.size.height - 1, 1), animate=False)


def _outcome_line(tree: TreeSeen) -> Content:
    """Return the output of the pass in one line."""
    guessed = "".join(visible(tree.text[node]) for node in tree.accepted[1:])
    bonus = f"★{visible(tree.bonus)}" if tree.bonus else ""
    return Content.assemble("output  ", (guessed, "$text-success bold"), bonus)
