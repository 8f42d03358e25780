"""`offspec distill`: a folder or JSON on stdout, everything else on stderr."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import Result

from offspec.core.errors import DiskFullError
from offspec.core.events import LoadProgress, Notice
from offspec.distill import distill_head as heads
from offspec.distill.config import DistillConfig
from offspec.distill.train import RANKS, HeadAcceptance, TrainingResult

Call = Callable[..., Result]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments of the command; nothing is trained. failure: the error to raise."""
    recorded: dict[str, Any] = {}

    def distill_head(
        wanted: DistillConfig, *, notify: Callable[[object], None], **given: Any
    ) -> heads.DistillResult:
        recorded.update(wanted=wanted, **given)
        notify(Notice(f"distilling [{wanted.model}]"))
        notify(LoadProgress("training", 1, 10, "steps", "loss 3.1"))
        if "failure" in recorded:
            raise recorded["failure"]
        acceptance = np.zeros((2, RANKS))
        acceptance[:, 0] = 0.5, 0.25
        measured = HeadAcceptance(acceptance, 4000)
        trained = TrainingResult(100, 2.5, 60.0, (3.0, 3.5))
        return heads.DistillResult(
            Path("/some/place"), wanted.kind, 20_000, measured, trained, 2_660_000, 120.0
        )

    monkeypatch.setattr(heads, "distill_head", distill_head)
    return recorded


def test_folder_goes_to_stdout(offspec: Call, recorded: dict[str, Any], tmp_path: Path) -> None:
    result = offspec("distill", "some/m", "--kind", "medusa", "--out", str(tmp_path / "head"))
    assert result.exit_code == 0
    assert result.stdout == "/some/place\n"
    assert result.stderr.splitlines() == [
        "distilling [some/m]",
        "medusa: 2.66 MB of weights, 20000 tokens of text, 2.5 epochs, in 2 min",
        "top-1 accuracy by depth on 4000 held-out tokens: 50 % (top 5: 50 %), 25 % (top 5: 25 %)",
        "expected with trees of 64 nodes: 1.62 tokens per pass",
    ]
    assert recorded["wanted"] == DistillConfig("some/m", "medusa", tmp_path / "head")
    assert recorded["memory"] is None


def test_options_are_passed_on(offspec: Call, recorded: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "p").write_text("Why?")
    options = (
        "--kind mlp --tokens 2M --length 99 --epochs 3 --minutes 1.5 --depth 5 --memory 2GB --dtype float32"
    )
    result = offspec(
        "distill",
        "some/m",
        "--out",
        str(tmp_path),
        "--prompts",
        str(tmp_path / "p"),
        "--quiet",
        *options.split(),
    )
    assert recorded["wanted"] == DistillConfig("some/m", "mlp", tmp_path, 2_000_000, 99, 3, 1.5, 5)
    assert recorded["prompts"] == tmp_path / "p"
    assert (recorded["memory"], recorded["dtype"], recorded["device"]) == (2_000_000_000, "float32", "auto")
    assert result.stderr == ""


def test_json(offspec: Call, recorded: dict[str, Any], tmp_path: Path) -> None:
    result = offspec("distill", "some/m", "--kind", "mlp", "--out", str(tmp_path), "--json")
    found = json.loads(result.stdout)
    assert found["folder"] == "/some/place"
    assert found["first_guess"] == [0.5, 0.25]
    assert found["tokens_per_pass"] == pytest.approx(1.625)


def test_errors_are_one_line(offspec: Call, recorded: dict[str, Any], tmp_path: Path) -> None:
    for failure, code, message in (
        (DiskFullError("no room"), 1, "error: no room\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
    ):
        recorded["failure"] = failure
        result = offspec("distill", "some/m", "--kind", "mlp", "--out", str(tmp_path), "--quiet")
        assert (result.exit_code, result.stdout, result.stderr) == (code, "", message)
