"""`offspec hardware`: a page or JSON on stdout, everything else on stderr."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from offspec.core.errors import DiskFullError
from offspec.core.events import LoadProgress, Notice
from offspec.plan import hardware_profile as machine
from offspec.ui.cli.console import Console
from offspec.ui.cli.hardware import machine_section
from offspec.ui.cli.tables import PageLayout, page
from offspec_planners.hardware_rates import Hardware, Rate, preset, preset_names

Call = Callable[..., Result]
MINE = Hardware("mine, 8 GB RAM", 8_000_000_000, Rate(2e9, 1.5e9, 2.5e9), None, preset("rtx-4090").processor)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments of the command; nothing is measured."""
    recorded: dict[str, Any] = {}

    def profile(device: str, notify: Callable[[object], None], **options: Any) -> machine.Profile:
        recorded.update(device=device, **options)
        notify(LoadProgress("measuring this machine", 0, 4, "steps"))
        notify(Notice("no [O_DIRECT] here"))
        if "failure" in recorded:
            raise recorded["failure"]
        return machine.Profile(MINE, "2026-01-02T03:04:05+00:00")

    monkeypatch.setattr(machine, "profile", profile)
    return recorded


def test_page_shows_figures_with_their_spread(offspec: Call, recorded: dict[str, Any]) -> None:
    result = offspec("hardware")
    assert result.exit_code == 0
    assert result.stdout.startswith("Machine, measured: mine, 8 GB RAM\n")
    assert "2.00 GB/s" in result.stdout and "1.50" in result.stdout and "2.50 GB/s" in result.stdout
    assert "measured 2026-01-02T03:04:05+00:00" in result.stdout
    assert "\x1b" not in result.stdout
    assert result.stderr == "no [O_DIRECT] here\n"
    assert recorded == {"device": "auto", "remeasure": False, "folder": None}


def test_options_are_passed_on(offspec: Call, recorded: dict[str, Any], tmp_path: Path) -> None:
    offspec("hardware", "--again", "--path", str(tmp_path), "--device", "cuda:1")
    assert recorded == {"device": "cuda:1", "remeasure": True, "folder": tmp_path}


def test_preset_is_shown_with_its_sources(offspec: Call, recorded: dict[str, Any]) -> None:
    result = offspec("hardware", "rtx-3060-12gb")
    assert "from published figures: RTX 3060 12 GB" in result.stdout
    assert "Sources of the figures" in result.stdout and "PCIe 4.0 x16" in result.stdout
    assert recorded == {} and result.stderr == ""


def test_preset_is_saved_as_a_file(offspec: Call, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(offspec("hardware", "rtx-4090", "--json").stdout.replace("25000000000", "12e9"))
    shown = json.loads(offspec("hardware", str(file), "--json").stdout)
    assert shown["link"] == 12_000_000_000


def test_control_characters_of_a_file_are_not_printed(offspec: Call, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    values = MINE.to_json() | {"name": "a\x1b[31m [bold]name[/]"}
    file.write_text(json.dumps(values))
    result = offspec("hardware", str(file))
    assert "\x1b" not in result.stdout and "[bold]name[/]" in result.stdout


def test_presets_are_listed(offspec: Call) -> None:
    """Each in a line that begins with its name: memory, disk and link."""
    lines = offspec("hardware", "list").stdout.splitlines()
    assert lines[0].split() == ["preset", "VRAM", "RAM", "disk", "RAM", "to", "VRAM"]
    assert [line.split()[0] for line in lines[1:]] == list(preset_names())
    listed = {line.split()[0]: re.split(r"  +", line)[1:] for line in lines[1:]}
    assert listed["rtx-4090"] == ["25.25 GB", "67.35 GB", "6.50 GB/s", "25.00 GB/s"]
    assert listed["desktop-32gb"][0] == "no GPU" and len(listed["desktop-32gb"]) == 3


def test_errors_are_one_line(offspec: Call, recorded: dict[str, Any]) -> None:
    for failure, code, message in (
        (DiskFullError("no room"), 1, "error: no room\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
    ):
        recorded["failure"] = failure
        result = offspec("hardware", "--quiet")
        assert (result.exit_code, result.stdout, result.stderr) == (code, "", message)


@pytest.mark.parametrize("width", [40, 80])
def test_long_name_wraps_within_its_column(width: int) -> None:
    name = "AMD EPYC, 2 threads, OMP_WAIT_POLICY=active, GOMP_SPINCOUNT=100000"
    machine = replace(MINE, processor=replace(MINE.processor, name=name))
    layout = PageLayout(width)
    shown = page(Console(width=width), lambda _: machine_section(machine, layout)).splitlines()
    first = next(place for place, line in enumerate(shown) if "AMD EPYC" in line)
    ends = next(place for place, line in enumerate(shown) if line.split()[:1] == ["RAM"])
    begins = shown[first].index("AMD EPYC")
    assert ends > first + 1, "it takes several lines"
    assert {len(line) - len(line.lstrip()) for line in shown[first + 1 : ends]} == {begins}
