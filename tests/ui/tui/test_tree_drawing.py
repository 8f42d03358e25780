"""Trees as lines: one per node, with the path marked and folded nodes counted."""

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from offspec.core.events import TreeSeen
from offspec.ui.tui.tree_drawing import Line, caption, draw, percent, visible
from tests.ui.tui.trees import bush, chain, sentence, tree


def texts(lines: list[Line]) -> list[str]:
    return ["".join(span.text for span in line) for line in lines]


def test_folded_tree() -> None:
    assert texts(draw(sentence())) == [
        "    0    100%  ● ⏎",
        "    1     25%  ┠─○ Because  ▸ 2 more",
        "    1     10%  ┠─○ It",
        "    1   ≤5.0%  ┠─▸ 3 more tokens",
        "    1     50%  ● The",
        "    2    5.0%  ┠─○ ·blue",
        "    2     40%  ● ·sky",
        "    3   bonus  ★ ·is",
    ]


def test_unfolded_tree() -> None:
    assert texts(draw(sentence(), folded=False))[1:8] == [
        "    1     25%  ┠─○ Because",
        "    2     12%  ┃ ○ ·light",
        "    3    6.2%  ┃ ○ ·scatters",
        "    1     10%  ┠─○ It",
        "    1    5.0%  ┠─○ A",
        "    1    3.0%  ┠─○ Sun",
        "    1    2.0%  ┠─○ Light",
    ]


def test_branches_of_a_rejected_token() -> None:
    seen = tree(
        parent=[-1, 0, 1, 1, 3],
        text=["a", "b", "c", "d", "e"],
        chance=[1.0, 0.5, 0.6, 0.3, 0.5],
        accepted=[0],
        bonus="z",
    )
    assert texts(draw(seen, folded=False)) == [
        "    0    100%  ● a",
        "    1     50%  ┠─○ b",
        "    2     15%  ┃ ├─○ d",
        "    3    7.5%  ┃ │ ○ e",
        "    2     30%  ┃ ○ c",
        "    1   bonus  ★ z",
    ]


def test_folded_branches_show_their_number_of_nodes() -> None:
    seen = tree(
        parent=[-1, 0, 0, 0, 0, 0, 5],
        text=list("rabcdef"),
        chance=[1.0, 0.3, 0.2, 0.1, 0.09, 0.08, 0.5],
        accepted=[0],
        bonus="z",
    )
    assert texts(draw(seen))[3] == "    1    ≤10%  ┠─▸ 3 more tokens, 4 nodes"
    one = tree([-1, 0, 0, 0], list("rabc"), [1.0, 0.3, 0.2, 0.1], [0], "z")
    assert not any("▸" in text for text in texts(draw(one))), "its line is as informative as a count"


def test_captions_of_passes_with_and_without_draft_tokens() -> None:
    seen = TreeSeen(1, (-1,), ("x",), (1.0,), (0,), "y")
    assert texts(draw(seen)) == ["    0    100%  ● x", "    1   bonus  ★ y"]
    assert caption(seen, 1, 1) == "pass 1 of 1: 1 node, 0 accepted + 1 bonus; expected by the draft: 1.0"
    expected = "pass 7 of 12: 11 nodes, 2 accepted + 1 bonus; expected by the draft: 2.6"
    assert caption(sentence(), 7, 12) == expected


def test_signs_and_styles_agree() -> None:
    """The tree reads the same without colour."""
    meaning = {"●": "accepted", "○": "rejected", "★": "bonus"}
    for line in draw(sentence(), folded=False):
        sign = line[-1]
        assert sign.style == meaning[sign.text[0]]


def test_large_trees_have_a_line_per_node_and_one_for_the_bonus() -> None:
    for seen in (chain(1000), bush(1000)):
        lines = draw(seen, folded=False)
        assert len(lines) == len({line[-1].text for line in lines}) == 1001


def test_folded_and_shown_nodes_add_up_to_the_tree() -> None:
    shown = folded = 0
    for text in texts(draw(bush(1000))):
        shown += any(sign in text for sign in "●○")
        if "▸" in text:
            words = text.split("▸")[1].replace(",", "").split()
            folded += int(words[3] if "nodes" in words else words[0])
    assert shown + folded == 1000


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" the", "·the"),
        ("\n\n\t", "⏎⏎⇥"),
        ("", "(no text)"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\u202eabc", "\\u202eabc"),
        ("\u00a0", "\\xa0"),
        ("\u0301", "◌\u0301"),
        ("e\u0301", "e\u0301"),
        ("\u200d", "\\u200d"),
        ("天空", "天空"),
        ("🙂", "🙂"),
        ("x" * 41, "x" * 39 + "…"),
        ("天" * 21, "天" * 19 + " …"),
    ],
)
def test_tokens_are_visible(text: str, shown: str) -> None:
    assert visible(text) == shown


@given(st.text(max_size=60))
@settings(max_examples=50)
def test_tokens_cannot_contain_terminal_codes(text: str) -> None:
    shown = visible(text)
    assert not {unicodedata.category(character) for character in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert 0 < cell_len(shown) <= 40


@pytest.mark.parametrize(
    ("probability", "shown"),
    [(1.0, "100%"), (0.8312, "83%"), (0.0996, "10%"), (0.0312, "3.1%"), (1e-9, "0.0%"), (1.0000001, "100%")],
)
def test_percentages(probability: float, shown: str) -> None:
    assert percent(probability) == shown
