"""Requests, chats, cancels and reloads in one process: what it prints; threads and files are flat."""

from pathlib import Path

import pytest

from bench.soak import Reading, slopes, soak
from tests.support.tiny_models import write_model


def test_a_short_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path, num_hidden_layers=2, spread=0.2)
    readings = soak(model, 30, 20)
    assert readings[-1].requests >= 30
    assert capsys.readouterr().out.count("\n") == len(readings)
    assert readings[-1].files <= readings[0].files
    assert set(slopes(readings)) == {"resident_mb", "threads", "files"}


def test_slopes() -> None:
    readings = [Reading(1000 * at, 100 + 2.0 * at, 4, 9) for at in range(6)]
    assert slopes(readings) == {"resident_mb": 2.0, "threads": 0.0, "files": 0.0}
    assert slopes(readings[:1]) == {}
