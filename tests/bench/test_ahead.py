"""The bench of drafting ahead, on small ones."""

from pathlib import Path
from typing import Any

import pytest

from bench.ahead import __main__ as bench
from bench.ahead import worker
from bench.ahead.__main__ import compared, same_answers, shortfalls, summed
from offspec import SamplingParams
from tests.support.bench_runs import RunBench
from tests.support.tiny_models import tiny_engine, write_model


def _answer(ahead: bool, draft: float, target: float, *ids: int) -> dict[str, object]:
    one = {"tokens": 4, "nodes": 8, "steps": 2, "draft": draft, "target": target}
    rest = {"beside": 0.0, "computed": 0.5, "bytes": 7}
    return {"prompt": "a", "ahead": ahead, "token_ids": list(ids), "passes": [{**one, **rest}] * 2}


def test_a_run(run_bench: RunBench, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = list[dict[str, Any]]()

    def measured(args: object, module: str, job: dict[str, Any]) -> dict[str, Any]:
        jobs.append(job)
        answers = [_answer(False, 1.0, 3.0, 5, 6), _answer(True, 0.25, 3.0, 5, 7)]
        return {"planned": True, "budget": 8, "answers": answers}

    monkeypatch.setattr(bench, "measured_job", measured)
    ran = run_bench(bench.main, "--factor", "1", "--memory", "2GB", "--prompts", "1", "--no-cgroup")
    (job,) = jobs
    assert (job["load"]["model"], job["load"]["memory"], len(job["prompts"])) == ("demo", "2GB", 1)
    assert ran.code == 1 and any("answers differ" in line for line in ran.lines)
    assert (ran.summary["hidden"], ran.record["cases"][0]["on"]["draft"]) == (0.75, 0.25)


def test_an_answer_and_its_passes(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    with tiny_engine(folder, str(folder), budget=8, width=4) as engine:
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        before, ahead = (worker.answer(engine, [5, 9, 17, 33], params, on) for on in (False, True))
    assert before["token_ids"] == ahead["token_ids"]
    assert sum(one["tokens"] for one in before["passes"]) < 12, "the first is not counted"
    assert not any(one["beside"] for one in before["passes"])


def test_what_is_hidden_and_how_much_faster_that_is() -> None:
    answers = [_answer(False, 1.0, 3.0, 5, 6), _answer(True, 0.25, 3.0, 5, 6)]
    found = compared(summed(answers, False), summed(answers, True))
    assert (found["hidden"], found["most"]) == (0.75, 4 / 3)
    assert found["faster"] == found["faster_alike"] == 4 / 3.25
    assert len(shortfalls(found, planned=True)) == 1
    assert shortfalls(found, planned=False) == []
    assert same_answers(answers)
    assert not same_answers([*answers, _answer(True, 0.25, 3.0, 5, 7)])
