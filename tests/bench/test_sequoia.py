"""The bench of static trees, on small ones."""

import numpy as np
import pytest

from bench import sequoia
from tests.support.bench_runs import RunBench


def test_a_run(run_bench: RunBench) -> None:
    small = ["--nodes", "60", "--depth", "4", "--children", "5", "--seeds", "2", "--repeats", "1"]
    ran = run_bench(sequoia.main, *small)
    assert set(ran.summary["kinds"]) == {*sequoia.FALLING, *sequoia.RISING}
    assert all(found["expected_tokens"] > 1 for found in ran.summary["kinds"].values())
    assert (ran.code, ran.record["nodes"]) == (0, 60)


@pytest.mark.parametrize("name", [*sequoia.FALLING, *sequoia.RISING])
def test_each_kind_is_what_its_solver_is_for(name: str) -> None:
    kind = {**sequoia.FALLING, **sequoia.RISING}[name]
    table = kind(np.random.default_rng(0), 24, 32)
    assert table.shape == (24, 32) and (table >= 0).all() and (table <= 1).all()
    assert (np.diff(table, axis=1) > 0).any() == (name in sequoia.RISING)
