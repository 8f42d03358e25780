"""Markdown parser of all displayed text. A newline within a paragraph is a line break, as in a poem."""

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore


def markdown_parser() -> MarkdownIt:
    """Return a CommonMark parser with tables and strikethrough. HTML is shown as text, not dropped."""
    parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
    parser.core.ruler.push("line_breaks", _keep_line_breaks)
    return parser


def _keep_line_breaks(state: StateCore) -> None:
    """Turn soft breaks into hard ones, because Rich renders single newlines as spaces."""
    for token in state.tokens:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
