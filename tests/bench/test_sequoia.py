"""The bench of static trees, on small ones."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench import sequoia


def test_sequoia_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    small = ["--nodes", "60", "--depth", "4", "--children", "5", "--seeds", "2", "--repeats", "1"]
    assert sequoia.main([*small, "--json", str(out)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("ceiling") and sum(line.startswith("reached") for line in printed) == 2
    last = json.loads(printed[-1])
    assert set(last["kinds"]) == {*sequoia.FALLING, *sequoia.RISING}
    assert all(found["expected_tokens"] > 1 for found in last["kinds"].values())
    assert json.loads(out.read_text())["nodes"] == 60


@pytest.mark.parametrize("name", [*sequoia.FALLING, *sequoia.RISING])
def test_each_kind_is_what_its_solver_is_for(name: str) -> None:
    kind = {**sequoia.FALLING, **sequoia.RISING}[name]
    table = kind(np.random.default_rng(0), 24, 32)
    assert table.shape == (24, 32) and (table >= 0).all() and (table <= 1).all()
    assert (np.diff(table, axis=1) > 0).any() == (name in sequoia.RISING)
