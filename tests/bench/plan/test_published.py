"""The bench of published figures: every row is predicted, and what is off is explained."""

import pytest

from bench.plan import published
from bench.plan.published_rows import MODELS, ROWS, SYSTEMS
from tests.support.bench_runs import RunBench


def test_a_run(run_bench: RunBench) -> None:
    ran = run_bench(published.main)
    assert ran.code == 0 and len(ran.summary["rows"]) == len(ROWS)
    assert set(ran.record["assumed"]) == set(SYSTEMS) == {row.system for row in ROWS}
    for row in ran.record["rows"]:
        assert row["ratio"] == pytest.approx(row["predicted"] / row["published"])
        assert row["pass"] >= max(row["link"], row["draft"] + row["compute"])
        assert abs(row["ratio"] - 1) <= published.WANTED or row["why_not"]
        assert row["source"]


def test_what_was_published_whole_agrees() -> None:
    """Within 30 % in all but one of the rows whose tokens per pass are known."""
    known = [published.predict(row).per_token / row.seconds for row in ROWS if row.tokens is not None]
    assert len(known) >= 10 and sum(abs(ratio - 1) > published.WANTED for ratio in known) <= 1


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("Llama-3-70B", 69.5e9), ("Llama-3-8B", 7.5e9), ("Llama-3.2-1B", 1.24e9), ("Llama-2-7B", 6.6e9)],
)
def test_shapes_give_the_known_numbers_of_weights(name: str, parameters: float) -> None:
    assert published.sizes_of(name).parameters == pytest.approx(parameters, rel=0.01)
    half = published.sizes_of(name, 4)
    assert sum(half.layers) == pytest.approx(0.26 * sum(published.sizes_of(name).layers), rel=1e-6)


def test_layers_stay_as_a_row_says() -> None:
    rows = {row.label: row for row in ROWS}
    umbrella = next(row for row in ROWS if row.resident == 16)
    target = published.sizes_of(umbrella.target, 4)
    link = published.machine_of(umbrella).link
    assert link is not None
    moved = published.predict(umbrella).link * link.value
    assert moved == pytest.approx(64 / 80 * sum(target.layers), rel=1e-3)
    filled = published.predict(rows["4090, Vicuna-33B, no draft"])
    assert filled.link * 25e9 < sum(published.sizes_of("Vicuna-33B").layers) - 15e9


def test_every_model_is_used() -> None:
    assert set(MODELS) == {row.target for row in ROWS} | {row.draft for row in ROWS if row.draft}
