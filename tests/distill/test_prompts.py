"""Questions for the target."""

import json
from pathlib import Path

from offspec.distill.prompts import builtin_questions, cyclic_item, read_prompts

ROOT = Path(__file__).parents[2]


def test_they_are_many_and_all_different() -> None:
    questions = builtin_questions()
    assert len(questions) > 800
    assert len(set(questions)) == len(questions)
    assert sum("Python" in question for question in questions[:100]) >= 1


def test_none_is_a_prompt_of_the_benches() -> None:
    asked = {
        json.loads(line)["prompt"]
        for file in (ROOT / "bench" / "prompts").glob("*.jsonl")
        for line in file.read_text("utf-8").splitlines()
    }
    assert asked
    assert not asked & set(builtin_questions())


def test_a_file_of_lines_or_objects(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two", "id": 3}\n')
    assert read_prompts(tmp_path / "a.txt") == read_prompts(tmp_path / "b.jsonl") == ["one", "two"]


def test_a_list_begins_again() -> None:
    assert [cyclic_item("abc", number) for number in (0, 2, 3, 7)] == [("a", 0), ("c", 0), ("a", 1), ("b", 2)]
