"""The bench of sources: on a tiny model, and its comparison on figures made by hand."""

import argparse
from pathlib import Path

import pytest

from bench import sources
from bench.acceptance import Answer
from tests.support.bench_runs import RunBench
from tests.support.tiny_models import write_model


@pytest.mark.exhaustive
def test_a_run_tells_tokens_by_source(tmp_path: Path, run_bench: RunBench) -> None:
    small = ["--prompts", "2", "--copies", "1", "--tokens", "8", "--copied-tokens", "12", "--budget", "16"]
    which = ["--alone", "suffix", "substitute", "--mixed", "substitute,suffix", "--dtype", "float32"]
    ran = run_bench(sources.main, str(write_model(tmp_path / "model")), *small, *which, "--width", "4")
    assert ran.record | ran.summary == ran.record
    runs = ran.summary["runs"]
    assert [run["choice"] for run in runs] == 2 * ["suffix", "substitute", "substitute + suffix"]
    assert ran.summary["prompts"] == 3 and set(runs[0]["kinds"]) > {"copy"}
    tokens = {t: {run["tokens"] for run in runs if run["temperature"] == t} for t in (0.0, 1.0)}
    assert all(len(same) == 1 for same in tokens.values()), "the answers do not depend on the source"
    assert "<svg" in ran.plot.read_text()


def test_a_mixture_is_compared_with_the_best_of_its_own_sources() -> None:
    def answer(draft: str, kind: str, passes: int) -> Answer:
        return Answer(f"{kind}-1", kind, "coupled", 0.0, 60, passes, 1.0, "length", draft, None)

    passes = {"a": (30, 20), "b": (20, 10), "c": (1, 1), "a + b": (15, 8)}
    answers = [
        answer(draft, kind, count)
        for draft, counts in passes.items()
        for kind, count in zip(("chat", "copy"), counts, strict=True)
    ]
    args = argparse.Namespace(
        model="demo",
        alone=["a", "b", "c"],
        mixed=["a,b"],
        temperatures=[0.0],
        dtype="float32",
        tokens=60,
        copied_tokens=60,
        budget=64,
        width=8,
        seed=1,
    )
    mixed = sources.summarise(args, answers)["runs"][-1]
    assert mixed["choice"] == "a + b" and mixed["others"]["pooled"] == 4.0
    assert mixed["over_best_single"] == {"chat": pytest.approx(4 / 3), "copy": pytest.approx(7.5 / 6)}
