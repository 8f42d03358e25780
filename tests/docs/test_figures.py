"""Figures in README.md and docs/figures.md equal those of their records in bench/results/."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs import make_models
from docs.figure_records import PAGES
from docs.figure_records.block import Block
from docs.figure_records.record import Record

ROOT = Path(__file__).parents[2]
_NUMBER = r"(?<![\w.,-])\d+(?:,\d{3})*(?:\.\d+)?(?![\d,]*[\w-])"
_UNIT = r"(?:%|times|tokens?/s|tok/s|tokens? per (?:second|pass)|GB/s|seconds?|ms|s)(?!\w)"
_DIFFERENCES = ("first_differences", "mismatches", "cases_with_mismatch", "differ", "wrong")
# Numbers that are names: versions, and bus generations.
_NAMES = re.compile(r"(?:Python|torch|Triton|transformers|PCIe|alpha \(|Apache-) ?\d[\d.]*\)?", re.IGNORECASE)


def blocks(page: str) -> Iterator[str]:
    """Rows of tables, list items and paragraphs, as printed."""
    text = re.sub(r"<!--.*?-->", "", page, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for part in re.split(r"\n\s*\n", text):
        lines = [line.removeprefix("> ") for line in part.strip("\n").splitlines()]
        at = [place for place, line in enumerate(lines) if place == 0 or line.startswith(("|", "- "))]
        for begin, end in zip(at, [*at[1:], len(lines)], strict=True):
            if block := " ".join(line.strip() for line in lines[begin:end]).strip():
                yield block


def cleaned(block: str) -> str:
    """Text without code, link targets, and names that are numbers."""
    text = re.sub(r"`[^`]*`", "", block)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return _NAMES.sub("", text)


def claims(block: str) -> list[str]:
    """The figures that need a record.

    In table cells that begin with a number: all numbers. Elsewhere: numbers with a decimal point, or with a
    unit of speed, time or share. Headings, and the first cell of a row, describe the figures.
    """
    if block.startswith("#"):
        return []
    text = cleaned(block)
    cells = text.strip("|").split("|")[1:] if text.startswith("|") else []
    figures = [cell for cell in cells if re.match(r"[\s*]*\d", cell)]
    found = re.findall(_NUMBER, " ".join(figures))
    text = " ".join(cell for cell in cells if cell not in figures) if text.startswith("|") else text
    for number in re.finditer(_NUMBER, text):
        if "." in number[0] or re.match(r"\s?" + _UNIT, text[number.end() :]):
            found.append(number[0])
    return found


def printed_as(value: float, figure: str) -> str:
    """Return the value rounded to the decimals of the figure."""
    decimals = len(figure.partition(".")[2])
    return f"{value:,.{decimals}f}" if "," in figure else f"{value:.{decimals}f}"


def changed_answers(record: Any) -> list[str]:
    """Parts of a record showing that speculation, or a kernel, changed an answer."""
    found = list[str]()

    def walk(value: Any, path: str, key: str = "") -> None:
        if isinstance(value, dict):
            for name, each in value.items():
                walk(each, f"{path}.{name}", name)
        elif isinstance(value, list) and not key.startswith("mismatch"):
            for place, each in enumerate(value):
                walk(each, f"{path}.{place}", key)
        if (
            (re.match("same(_tokens|_texts)?$", key) and value is False)
            or (key in _DIFFERENCES and value)
            or (isinstance(value, str) and "speculation changed" in value)
        ):
            found.append(f"{path.strip('.')}: {value}")

    walk(record, "")
    return found


def the_block(page: str, wanted: Block) -> str:
    """Return the only block of the page that begins with `wanted.start`."""
    found = [block for block in blocks(page) if block.startswith(wanted.start)]
    assert len(found) == 1, f"{len(found)} blocks begin with {wanted.start!r}"
    return found[0]


def wrong_figures(page: str, known: tuple[Block, ...]) -> list[str]:
    """Return one line for each figure that is not in its record or has no record."""
    wrong, recorded = [], dict[str, set[str]]()
    for each in known:
        text = the_block(page, each)
        figures = recorded.setdefault(text, set())
        figures |= {*each.figures, *each.at_most}
        numbers = re.findall(_NUMBER, cleaned(text))
        wrong += [f"{each.start}: {figure} is not printed" for figure in figures if figure not in numbers]
        for figure, values in each.figures.items():
            for value in values if isinstance(values, tuple) else (values,):
                if printed_as(value, figure) != figure:
                    wrong.append(f"{each.start}: {figure} is {value:.6g} in its record")
        for figure, values in each.at_most.items():
            wrong += [
                f"{each.start}: {value:.6g} is more than {figure}"
                for value in values
                if value > float(figure)
            ]
    for text in blocks(page):
        missing = [figure for figure in claims(text) if figure not in recorded.get(text, ())]
        wrong += [f"{text[:60]}: no record for {figure}" for figure in missing]
    return wrong


@pytest.mark.parametrize("page", PAGES)
def test_figures_equal_their_records(page: str) -> None:
    assert wrong_figures((ROOT / page).read_text("utf-8"), PAGES[page]) == []


@pytest.mark.parametrize(
    "record",
    sorted({record for known in PAGES.values() for each in known for record in each.records}, key=str),
    ids=lambda record: "-".join(map(str, (record.file, *record.path))),
)
def test_no_record_has_changed_answers(record: Record) -> None:
    assert changed_answers(record.value) == []


def test_record_of_changed_answers_is_detected() -> None:
    assert changed_answers(Record("peers.json").value)
    assert changed_answers({"runs": [{"same_tokens": False}]}) == ["runs.0.same_tokens: False"]
    assert changed_answers({"answers": [{"mismatches": [{"index": 3}]}]})
    assert changed_answers({"shortfalls": ["speculation changed 1 answers at temperature 0"]})
    assert not changed_answers(
        {"same_tokens": None, "mismatches": None, "first_differences": {}, "same": True}
    )


@pytest.mark.parametrize(
    ("page", "complaint"),
    [
        ("| a | 4.25 |", ""),
        ("| a | 4.3 |", "4.25 is not printed"),
        ("| a | 4.25 | 7 |", "no record for 7"),
        ("| a | 4.25 |\n\nIt is 12 times as fast.", "no record for 12"),
        (
            "| a | 4.25 |\n\nIt takes 0.5 s, with 48 tokens and Python 3.11 on an `x 3.5 y`.",
            "no record for 0.5",
        ),
        ("| a | 4.25 |\n\n- 37 % too high", "no record for 37"),
        ("| a | 4.25 |\n\nA 1.9B model of Qwen3-1.7B, a 24 GB card.", ""),
    ],
)
def test_figure_without_a_record_is_detected(page: str, complaint: str) -> None:
    record = Record("peers-x4.json", ("cases", 3))
    known = (Block("| a |", record, {"4.25": 4.2474}),)
    found = wrong_figures(page, known)
    assert any(complaint in line for line in found) if complaint else found == []


def test_figure_that_differs_from_its_record_is_detected() -> None:
    known = (Block("| a |", Record("peers.json"), {"5.2": 4.25}, {"10": (9.0, 12.3)}),)
    assert wrong_figures("| a | 5.2 | 10 |", known) == [
        "| a |: 5.2 is 4.25 in its record",
        "| a |: 12.3 is more than 10",
    ]


def test_model_table_equals_the_record() -> None:
    record = json.loads(make_models.RECORD.read_text("utf-8"))
    page = make_models.PAGE.read_text("utf-8")
    assert make_models.renewed(page, record) == page


@pytest.mark.exhaustive
def test_predictions_equal_offspec_plan() -> None:
    record = json.loads(make_models.RECORD.read_text("utf-8"))
    words = make_models.words("Qwen/Qwen3-8B", make_models.MACHINES["8 GB laptop GPU, 16 GB"])
    assert make_models.prediction(*words) == pytest.approx(record["plans"][" ".join(words)])
    plans = re.findall(
        r"<!-- offspec plan (.*?) -->\n```text\n.*: about ([\d.]+) tok/s",
        (ROOT / "docs" / "quickstart.md").read_text("utf-8"),
    )
    known = {asked: speed for asked, speed in plans if asked in record["plans"]}
    for asked, speed in known.items():
        assert printed_as(record["plans"][asked]["tok_per_s"], speed) == speed


def test_readme_is_short() -> None:
    page = (ROOT / "README.md").read_text("utf-8")
    assert len(page.splitlines()) <= 150
    for block in blocks(page):
        if not block.startswith(("|", "#", "!")):
            for sentence in re.split(r"(?<=[.:!?])\**\s", re.sub(r"\]\([^)]*\)", "]", block)):
                words = [word for word in sentence.split() if re.search(r"\w", word)]
                assert len(words) <= 25 or "·" in sentence, f"{len(words)} words: {sentence}"
