"""The bench of the server, with the demo model."""

import json

import pytest

from bench import serve
from tests.support.bench_runs import RunBench


@pytest.fixture
def drafters_stay() -> None:
    """They may rest, as they do where the bench is run."""


@pytest.mark.exhaustive
def test_a_run(run_bench: RunBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "WANTED", 0.0)
    ran = run_bench(serve.main, "--prompts", "1", "--tokens", "12", "--rounds", "1")
    assert ran.code == 0
    assert ran.lines[0].startswith("ceiling") and ran.lines[-2].startswith("reached")
    assert ran.summary["same_texts"] and ran.summary["ratio"] > 0
    # What the model says without a schema depends on how a processor rounds; with one it is always a person.
    persons = ran.record["persons"]
    assert any(person["same"] for person in persons)
    assert all({*json.loads(person["with"]["text"])} == {"name", "age", "city"} for person in persons)
