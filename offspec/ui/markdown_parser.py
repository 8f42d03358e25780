"""The parser of all Markdown that is shown. A newline within a paragraph is a line break, as in a poem."""

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore


def markdown_parser() -> MarkdownIt:
    """CommonMark with tables and strikethrough. HTML stays text: it would not be shown at all."""
    parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
    parser.core.ruler.push("line_breaks", _keep_line_breaks)
    return parser


def _keep_line_breaks(state: StateCore) -> None:
    """CommonMark leaves single newlines to the renderer, and Rich makes spaces of them."""
    for token in state.tokens:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
