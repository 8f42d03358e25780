"""The check of English detects its patterns, and finds nothing in the program and its docs."""

from pathlib import Path

import pytest

from tests.support import plain_english
from tests.support.plain_english import Passage, check


@pytest.mark.parametrize(
    ("kind", "text", "rules"),
    [
        ("docstring", "What answers.", ["opening"]),
        ("docstring", "That of an open file.", ["opening"]),
        ("docstring", "Whether the file is open.", []),
        ("docstring", "Identity stamp of an open file.", []),
        ("paragraph", "What follows may open so.", []),
        ("comment", "the user is told beside the panel", ["word", "word"]),
        ("comment", "the option `beside` of another program", []),
        ("string", "Where the disk is slow", []),
        ("sentence", "word " * 40, []),
        ("sentence", "word " * 41, ["length"]),
    ],
)
def test_patterns_are_detected(kind: str, text: str, rules: list[str]) -> None:
    assert [finding.rule for finding in check([Passage("file", 1, kind, text)])] == rules


def test_passages_of_code_and_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_english, "ROOT", tmp_path)
    code, page = tmp_path / "code.py", tmp_path / "page.md"
    code.write_text('"""First.\n\nSecond one."""\n\nx = "three words here"  # why\n')
    page.write_text("# Title\n\nOne sentence\nin two lines. Another.\n\n```\nno prose\n```\n\n| a | b c |\n")
    found = [(each.line, each.kind, each.text) for each in plain_english.all_passages([code, page])]
    assert found == [
        (1, "docstring", "First."),
        (3, "paragraph", "Second one."),
        (5, "string", "three words here"),
        (5, "comment", "why"),
        (1, "sentence", "Title"),
        (3, "sentence", "One sentence in two lines."),
        (3, "sentence", "Another."),
        (10, "sentence", "a"),
        (10, "sentence", "b c"),
    ]


def test_program_and_docs_are_plain() -> None:
    found = plain_english.findings()
    assert not found, "\n".join(
        ["rewrite these, or add an exception to plain_english.toml:", *map(str, found)]
    )


def test_every_exception_is_needed() -> None:
    passages = [finding.passage for finding in check(plain_english.all_passages())]
    for file, text in plain_english.exceptions():
        assert any(file == each.file and text in each.text for each in passages), f"{file}: {text}"
