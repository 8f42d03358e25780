"""`--trace` over a real, tiny model: what a file of a whole run holds."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offspec.plan import initial_fit
from offspec.plan.fit import find_fit
from offspec.ui.cli.main import app
from offspec_planners.placement import Placement, Tier
from tests.support.tiny_models import write_model
from tests.support.traces import assert_well_formed, content, spans, tracks


@pytest.mark.usefixtures("drafters_stay")
@pytest.mark.parametrize(
    ("placement", "read", "copied"),
    [
        (Placement.in_memory(3, [0], 2), {"layer 1", "layer 2"}, set()),
        (Placement((Tier.DEVICE, Tier.HOST, Tier.DISK), 2, 2), {"layer 2"}, {"layer 1", "layer 2"}),
    ],
    ids=["disk", "host and disk"],
)
def test_a_run_from_the_first_read_to_the_last_walk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: Placement, read: set[str], copied: set[str]
) -> None:
    # So small a model would stay in memory whole.
    monkeypatch.setattr(
        initial_fit, "find_fit", lambda *given: replace(find_fit(*given), placement=placement)
    )
    model, file = write_model(tmp_path / "model"), tmp_path / "run.json"
    args = "--raw --ignore-eos --max-tokens 12 --budget 16 --width 4 --dtype float32 --json"
    result = CliRunner().invoke(
        app, ["generate", str(model), "w5 w6 w7", *args.split(), "--trace", str(file)], prog_name="offspec"
    )
    assert result.exit_code == 0, result.output
    written = content(file)
    events = written["traceEvents"]
    assert_well_formed(events)
    assert written["otherData"]["dropped_events"] == 0

    passes = [e for e in spans(events, "engine") if e["name"] == "pass"]
    assert sum(e["args"]["emitted"] for e in passes) == 12
    assert len([e for e in spans(events, "verify") if e["name"] == "walk"]) == len(passes)

    computed = [e["name"] for e in spans(events, "compute") if e["name"].startswith("layer")]
    assert computed == [f"layer {i}" for _ in passes for i in range(3)]

    for kind, names in (("read", read), ("copy", copied)):
        moved = [e for track in tracks(events) if track.startswith(kind) for e in spans(events, track)]
        # Every pass takes each unit in at least one piece.
        counts = Counter(e["name"] for e in moved if e["name"] != "wait")
        assert counts.keys() == names and all(count >= len(passes) for count in counts.values())

    growths = [e for e in spans(events, "draft") if e["name"] == "grow"]
    assert growths
    for grown in growths:
        steps = [e for e in spans(events, "draft") if e["name"] == "step" and inside(e, grown)]
        assert len(steps) == grown["args"]["steps"]
        assert all(1 <= e["args"]["width"] <= 4 for e in steps)
        assert any(inside(grown, whole) for whole in passes)

    streamed = [e["args"]["value"] for e in events if e["ph"] == "C"]
    assert len(streamed) == len(passes) and streamed == sorted(streamed) and streamed[0] > 0


def inside(part: dict[str, Any], whole: dict[str, Any]) -> bool:
    return bool(whole["ts"] <= part["ts"] and part["ts"] + part["dur"] <= whole["ts"] + whole["dur"])
