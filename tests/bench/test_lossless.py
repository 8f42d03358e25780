"""The bench that looks for settings which change a token, on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from bench.lib.cgroup import BenchError
from bench.lossless import __main__ as lossless
from bench.lossless import worker
from bench.lossless.cases import BUDGETS, CHUNKS, KEPT, MEMORIES, Case, Question, cases, questions
from bench.lossless.tally import State, compare
from tests.support.bench_runs import RunBench
from tests.support.tiny_models import write_model

TEMPERATURES = (0.0, 0.6, 1.0)
CASE = Case(Question(3, 0.6), 7, "tight", 64, True)


@pytest.mark.parametrize("each", [1, 2, 4])
def test_every_prompt_comes_once_a_round_and_every_combination_in_144(each: int) -> None:
    prompts = 144 // each
    asked = list(questions(prompts, TEMPERATURES, 2))
    assert len({(one.prompt, one.temperature) for one in asked}) == 2 * prompts
    found = list(cases(asked[:prompts], len(TEMPERATURES), each))
    seen = [(c.question.temperature, c.budget, c.memory, c.chunk, c.kept) for c in found]
    assert sorted(seen) == sorted(product(TEMPERATURES, BUDGETS, MEMORIES, CHUNKS, KEPT))
    assert len({case.key for case in cases(asked, len(TEMPERATURES), each)}) == 2 * 144


@pytest.mark.parametrize(
    ("said", "expected", "end", "parting"),
    [
        ([1, 2, 3], [1, 2, 3], "length", None),
        ([1, 9, 3], [1, 2, 3], "length", (1, 9, 2)),
        ([1, 2], [1, 2, 3], "length", (2, None, 3)),
        ([1, 2, 3], [1, 2, 3], "eos", (3, None, None)),
    ],
)
def test_answers_are_compared_to_their_ends(
    said: list[int], expected: list[int], end: str, parting: tuple[int, int | None, int | None] | None
) -> None:
    reference = {"answers": [[5], expected], "ends": ["length", "length"]}
    found = compare("m", CASE, {"answers": [[5], said], "ends": ["length", end]}, reference)
    assert found.tokens == 1 + (3 if parting is None else parting[0] + 1)
    if parting is None:
        assert not found.mismatches
    else:
        (miss,) = found.mismatches
        assert (miss.turn, miss.index, miss.token, miss.reference) == (1, *parting)


def test_a_state_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "state.jsonl"
    State(file, {"tokens": 4}, resume=False).add("m", {"key": "a", "answers": [[1], [2]]})
    with file.open("a") as added:
        added.write('{"model": "m", "key": "b", "ans')
    state = State(file, {"tokens": 4}, resume=True)
    assert set(state.found) == {("m", "a")}
    state.add("m", {"key": "b"})
    assert set(State(file, {"tokens": 4}, resume=True).found) == {("m", "a"), ("m", "b")}
    with pytest.raises(BenchError, match="other settings"):
        State(file, {"tokens": 5}, resume=True)
    assert not State(file, {"tokens": 5}, resume=False).found


def test_a_changed_token_is_told_with_its_settings(
    tmp_path: Path, run_bench: RunBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is answered with seven nodes is falsified: all else agrees, in float32."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"one {i} two"}) + "\n" for i in range(3)))

    def run(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for found in map(json.loads, map(json.dumps, worker.work(json.loads(json.dumps(job))))):
            if "budget 7 " in found.get("key", ""):
                found["answers"][1][2] ^= 1
            yield found

    monkeypatch.setattr(lossless, "run", run)
    words = [
        "--models",
        str(write_model(tmp_path / "tiny")),
        "--prompt-file",
        str(prompts),
        "--dtype",
        "float32",
    ]
    words += [
        "--tokens",
        "6",
        "--second-tokens",
        "4",
        "--context",
        "128",
        "--state",
        str(tmp_path / "state.jsonl"),
    ]
    ran = run_bench(lossless.main, *words)
    assert ran.code == 1 and ran.record | ran.summary == ran.record
    assert ran.summary["cases"] == 12 and ran.summary["mismatches"] == ran.summary["cases_with_mismatch"] == 3
    assert ran.summary["settings"]["budget 7"]["mismatches"] == 3
    assert ran.summary["tokens"] == 12 * (6 + 4) - 3 * 1
    assert all((miss["turn"], miss["index"]) == (1, 2) for miss in ran.record["found"])
    again = run_bench(lossless.main, *words, "--resume")
    assert again.summary["cases"] == 12  # nothing is left to ask
