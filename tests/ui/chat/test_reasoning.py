"""Reasoning and text of an answer."""

import pytest

from offspec.ui.chat.reasoning import Part, split_reasoning, without_reasoning


def thinking(text: str, *, closed: bool = True) -> Part:
    return Part("thinking", text, closed)


def said(text: str) -> Part:
    return Part("text", text)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", []),
        ("Just text.\n", [said("Just text.\n")]),
        ("<think>\nhm\n</think>\n\nYes.", [thinking("hm"), said("Yes.")]),
        ("<thinking>hm</thinking>Yes.", [thinking("hm"), said("Yes.")]),
        ("<reasoning>hm</reasoning>Yes.", [thinking("hm"), said("Yes.")]),
        ("<think>\n\n</think>\n\nYes.", [said("Yes.")]),
        ("<think>\nstill at it", [thinking("still at it", closed=False)]),
        ("<think>", [thinking("", closed=False)]),
        ("so it is 4\n</think>\n\n4", [thinking("so it is 4"), said("4")]),
        (
            "<think>a</think>One.\n<think>b</think>\nTwo.",
            [thinking("a"), said("One."), thinking("b"), said("Two.")],
        ),
    ],
)
def test_parts(text: str, parts: list[Part]) -> None:
    assert split_reasoning(text) == parts


def test_reasoning_opened_by_the_template() -> None:
    assert split_reasoning("", "<think>\n") == [thinking("", closed=False)]
    assert split_reasoning("hm", "<think>\n") == [thinking("hm", closed=False)]
    assert split_reasoning("hm\n</think>\nYes.", "<think>\n") == [thinking("hm"), said("Yes.")]


def test_tags_mentioned_in_text_are_text() -> None:
    for text in (
        "Write <think> before what it thinks.",
        "The tag `</think>` ends it.",
        "```\n<think>\nx\n</think>\n```\n",
        "```xml\n</think>",
        "1 < 2 and <thinker>",
    ):
        assert split_reasoning(text) == [said(text)]


def test_unclosed_code_in_reasoning_does_not_swallow_the_answer() -> None:
    assert split_reasoning("<think>\n```py\nx = 1\n</think>\nDone.") == [
        thinking("```py\nx = 1"),
        said("Done."),
    ]


def test_growing_answer_never_moves_text_into_reasoning() -> None:
    text = "<think>\nhm `x`\n</think>\n\nYes, `<think>` is a tag.\n```\n<think>\n```\nEnd."
    spoken = ""
    for end in range(text.index("Yes") + 1, len(text) + 1):
        parts = split_reasoning(text[:end])
        assert [part.kind for part in parts] == ["thinking", "text"]
        assert parts[1].text.startswith(spoken.rstrip())
        spoken = parts[1].text


def test_without_reasoning() -> None:
    assert without_reasoning("<think>a</think>One.\n<think>b</think>\nTwo.") == "One.\n\nTwo."
    assert without_reasoning("  <think>only this") == "  <think>only this"
    assert without_reasoning("x = 1\n    y\n") == "x = 1\n    y"
