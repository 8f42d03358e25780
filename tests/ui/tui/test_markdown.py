"""Markdown as lines: independent of chunking, safe for any model output, and cheap if nothing changes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from offspec.ui.tui.markdown import MarkdownLines, StreamedMarkdown
from tests.ui.tui.small_apps import MarkdownPage

PIECES = ["\n", "\n\n", "- a", "1. ", "| a | b |", "\n|---|---|\n", "```", "~~~", "`", "**", "_", "# ", "> "]
WORDS = ["sky ", "日本 ", "🎉", "<b>", "[x](http://y) ", "![i](u)", "\\", "&amp;", "---", "[1]: u", "    "]
documents = st.lists(st.sampled_from(PIECES + WORDS), max_size=30).map("".join)
DOCUMENT = """# Title

Some *words*, `code` and a [link](https://example.org/a).

1. one
2. two
   - deeper

```python
def blue(sky: float) -> float:
    return sky ** -4
```

> said

| a | b |
|---|--:|
| 1 | 2 |

***

<script>alert(1)</script>
"""


def shown(lines: MarkdownLines, width: int = 40) -> list[str]:
    return ["".join(segment.text for segment in line).rstrip() for line in lines.lines(width, dark=True)]


def drawn(text: str, width: int = 40) -> list[str]:
    lines = MarkdownLines()
    assert lines.set_source(text)
    return shown(lines, width)


@given(text=documents, cuts=st.lists(st.integers(0, 120), max_size=6), width=st.integers(1, 60))
def test_chunking_makes_no_difference(text: str, cuts: list[int], width: int) -> None:
    grown = MarkdownLines()
    for cut in [*sorted(cuts), len(text)]:
        assert grown.set_source(text[:cut])
        grown.lines(width, dark=False)
    assert grown.source == text and shown(grown, width) == drawn(text, width)
    if width > 4:  # a table may need more
        assert "|" in text or all(cell_len(line) <= width for line in shown(grown, width))


def test_rendering_of_every_element() -> None:
    text = "\n".join(drawn(DOCUMENT))
    assert "Title\n\nSome words, code and a link" in text
    assert "(https://example.org/a)" in text, "an address is visible before it is followed"
    assert " 1 one\n 2 two\n" in text and "• deeper" in text
    assert "def blue(sky: float) -> float:" in text and "```" not in text
    assert "▌ said" in text and "<script>alert(1)</script>" in text
    assert "\n\n\n" not in text and not text.endswith("\n")


def test_code_highlighting_with_known_and_unknown_languages() -> None:
    def colours(language: str) -> int:
        lines = MarkdownLines()
        lines.set_source(f"```{language}\nreturn 'a' + 1\n```")
        return len(
            {segment.style.color for line in lines.lines(40, dark=True) for segment in line if segment.style}
        )

    assert colours("python") > colours("") == colours("no-such-language")
    assert colours("python title=x") == colours("python")


def test_only_the_last_block_is_parsed_again() -> None:
    lines, block = MarkdownLines(), "word " * 20 + "\n\n"
    for count in range(1, 101):
        assert lines.set_source(block * count)
    assert lines.read < 4 * len(block) * 100
    assert not lines.set_source("another text") and lines.source == block * 100


async def test_layout_runs_only_if_the_text_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = list[bool]()
    refresh = StreamedMarkdown.refresh

    def counted(self: StreamedMarkdown, *regions: object, layout: bool = False, **others: object) -> object:
        layouts.append(layout)
        return refresh(self, *regions, layout=layout, **others)

    prose = StreamedMarkdown("one")
    async with MarkdownPage(prose).run_test(size=(40, 20)) as pilot:
        await pilot.pause()
        monkeypatch.setattr(StreamedMarkdown, "refresh", counted)
        assert prose.set_source("one two") and layouts == [False]
        assert prose.set_source("one two") and layouts == [False]
        assert prose.set_source("one two\n\nthree") and layouts == [False, True]
        await pilot.pause()
        assert prose.size.height == 3 and not prose.set_source("two")
        await pilot.resize_terminal(6, 20)
        await pilot.pause()
        assert prose.size.height == 4


HAIKU = "An old silent pond\nA frog jumps into the pond\nSplash! Silence again"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (HAIKU, HAIKU.split("\n")),
        ("1 Main St\nOld Town\n\nBye", ["1 Main St", "Old Town", "", "Bye"]),
        ("- one\n  more\n- two", [" • one", "   more", " • two"]),
        ("> a\n> b", ["▌ a", "▌ b"]),
        ("*a\nb* `c\nd`", ["a", "b c d"]),  # a newline in a code span is a space, as in all Markdown
        ("two  \nspaces\\\nbackslash", ["two", "spaces", "backslash"]),
        # Characters that end lines in Python but not in Markdown.
        ("a\u2028b\u2028c\u2028d\n\nx\n\ny", ["a\u2028b\u2028c\u2028d", "", "x", "", "y"]),
    ],
)
def test_newlines_are_kept(text: str, lines: list[str]) -> None:
    assert drawn(text) == lines
    grown = MarkdownLines()
    assert all(grown.set_source(text[:end]) for end in range(len(text) + 1))
    assert shown(grown) == lines
