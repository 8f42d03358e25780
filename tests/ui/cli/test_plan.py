"""`offspec plan` in this process, with scripted planning: arguments and output."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import offspec.engine as package
from offspec.checkpoint.known_models import known_sizes, model_groups
from offspec.core import memory
from offspec.core.config import EngineConfig
from offspec.core.errors import CapacityError, DiskFullError
from offspec.core.events import LoadProgress, Notice
from offspec.ui.cli import checks
from offspec.ui.cli.main import app
from offspec_planners.hardware_rates import Rate
from offspec_planners.placement import Tier
from offspec_planners.plan import Part, Plan
from offspec_planners.plan.forecast import Validation, WhatIf
from tests.support.sample_plans import large, several, small, validation

Call = Callable[..., Result]
GB = 10**9
LARGEST, REFUSED = "meta-llama/Meta-Llama-3.1-405B-Instruct", "deepseek-ai/DeepSeek-V4-Flash"


@dataclass
class Planning:
    """Scripted planning: results, and the arguments that it got."""

    plan: Plan = field(default_factory=small)
    fails: BaseException | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    validated: dict[str, Any] = field(default_factory=dict)

    def make_plan(self, config: EngineConfig, *, notify: Callable[[Any], None], **arguments: Any) -> Plan:
        self.arguments = {"config": config, **arguments}
        notify(LoadProgress("measuring", 1, 2, "steps"))
        notify(Notice("planning again: less memory [1 GB] is free"))
        return self.plan

    def validate(self, config: EngineConfig, plan: Plan, **arguments: Any) -> Validation:
        self.validated = {"config": config, "plan": plan, **arguments}
        if self.fails is not None:
            raise self.fails
        return validation()


@pytest.fixture
def planning(monkeypatch: pytest.MonkeyPatch) -> Planning:
    planning = Planning()
    for name, functions in (
        ("calibration_run", {"make_plan": planning.make_plan}),
        ("validation", {"validate_plan": planning.validate}),
    ):
        module = ModuleType(f"offspec.engine.{name}")
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, f"offspec.engine.{name}", module)
        monkeypatch.setattr(package, name, module, raising=False)
    monkeypatch.setattr(checks, "check_files", lambda config, weights: None)  # the named files do not exist
    return planning


@pytest.fixture
def plan(planning: Planning, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Call `offspec plan demo …` with this page width."""

    def call(*args: str, columns: int = 80) -> Result:
        monkeypatch.setenv("COLUMNS", str(columns))
        return CliRunner().invoke(app, ["plan", "demo", *args], prog_name="offspec")

    return call


def test_defaults_reach_planning(plan: Call, planning: Planning) -> None:
    assert plan().exit_code == 0
    assert planning.arguments == {"config": EngineConfig("demo"), "hardware": None, "replan": False}
    assert not planning.validated


def test_every_option_reaches_planning(plan: Call, planning: Planning) -> None:
    args = """--draft small --draft-bits 4 --memory 1.5GB --vram 8GB --device cuda:1 --dtype float32
    --context 999 --temperature 0.6 --replan --validate --prompts 3 --quantize nf4 --sequences 8"""
    result = plan(*args.split())
    assert result.exit_code == 0, result.output
    config = EngineConfig(
        "demo",
        draft="small",
        draft_bits=4,
        memory=1_500_000_000,
        vram=8_000_000_000,
        device="cuda:1",
        dtype="float32",
        context=999,
        temperature=0.6,
        quantize="nf4",
        sequences=8,
    )
    assert planning.arguments == {"config": config, "hardware": None, "replan": True}
    assert (planning.validated["config"], planning.validated["plan"]) == (config, planning.plan)
    assert len(planning.validated["prompts"]) == 3


def test_hardware_option_determines_the_device(plan: Call, planning: Planning, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(large().hardware.text())
    assert plan("--hardware", str(tmp_path / "mine.json")).exit_code == 0
    assert planning.arguments["hardware"] == large().hardware
    assert planning.arguments["config"].device == "auto"
    plan("--hardware", str(tmp_path / "mine.json"), "--device", "cpu")
    assert planning.arguments["config"].device == "cpu"


def test_page_goes_to_stdout_and_progress_to_stderr(plan: Call) -> None:
    result = plan()
    assert result.stdout.startswith("SmolLM2-135M widened x4: about 7.38 tok/s\n")
    assert result.stderr == "planning again: less memory [1 GB] is free\n"
    assert plan("--quiet").stderr == ""


def test_content_of_the_page(plan: Call) -> None:
    page = plan().stdout
    for said in (
        "disk, direct reads      2.10 GB/s   1.90 to 2.20 GB/s",  # measured, with its spread
        "GFLOP/s    10.0   250",
        "ms         12.0  18.0  42.0  81.0",
        "█ RAM: 6 layers and the head   ░ disk: 24 layers",  # placement of the layers
        "KV caches               RAM            190.00 MB",
        "6 layers                RAM            678.00 MB",
        "total                   RAM   2.68 GB of 3.00 GB",
        "Minimum for this context and draft: 1.64 GB of RAM.",
        "draft                   self       quantized to 4 bits",  # the draft and the tree
        "budget                  256 nodes",
        "width                   16 nodes",
        "depth                   24 levels",
        "first token             1.43 s      for a prompt of 128; the prompt is",  # the forecast
        "a pass                  1.33 s      Transfer-bound: of 1.29 s of streaming",
        "tokens per pass         9.80        measured over 24 passes",
        "speed                   7.38 tok/s  at one token per pass: 0.775 tok/s",
        "budget in nodes",
        "1.00 GB more RAM        8.40 tok/s  x 1.1  9 more layers stay",  # possible improvements
        "the disk's speed drifted by 14 %",
    ):
        assert said in page


def test_page_with_several_sequences(plan: Call, planning: Planning) -> None:
    planning.plan = several()
    page = plan("--sequences", "8", columns=100).stdout
    for said in (
        "SmolLM2-135M widened x4: about 33.0 tok/s total, 4.12 for each of 8 sequences",
        "total speed             33.0 tok/s  4.12 for each of 8",
        "first token             1.43 s      for a prompt of 128; it waits for a pass of the others",
        "8 sequences              33.0  4.12    256  1.60 s  1.45 s    1.52 GB",
        "16 sequences             45.0  2.81    256  1.60 s  1.61 s    3.04 GB",
        "From 8 sequences on, doubling them raises the speed by less than half",
        "Prompts are read in chunks of 1,024 tokens",
    ):
        assert said in page
    assert "Twice as many sequences do not fit" not in page
    planning.plan = replace(several(), shared=several().shared[:-1])
    assert "Twice as many sequences do not fit with this context and draft." in plan(columns=100).stdout
    planning.plan = small()
    assert "sequence" not in plan().stdout


def test_singular_forms(plan: Call, planning: Planning) -> None:
    """Not "1 nodes"; the weights' format is in the title."""
    planning.plan = replace(small(), budget=1, width=1, depth=1, quantize="nf4")
    # Layers of a tiny model are not bound by memory, so its bandwidth is omitted.
    slow = replace(small().hardware.processor, bandwidth=Rate.exactly(21.74e6))
    planning.plan = replace(planning.plan, hardware=replace(small().hardware, processor=slow))
    page = plan().stdout
    assert "bfloat16 on cpu, weights in nf4," in page and "MB/s" not in page
    assert not re.search(r"\b1 (nodes|levels|layers|slots)\b", page)


def test_columns_of_the_list_stay_apart_in_a_pipe() -> None:
    lines = CliRunner().invoke(app, ["plan", "list"], env={"COLUMNS": "80"}).stdout.splitlines()
    models = [line for line in lines if "minimum RAM" in line]
    assert len(models) > 20
    assert all(re.fullmatch(r"  \S+ {2,}\d[\d.]* GB {2,}minimum RAM \d.*", line) for line in models)
    assert len({line.index("minimum RAM") for line in models}) == 1


@pytest.mark.parametrize("columns", [80, 200])
def test_known_models_are_listed_with_their_memory(
    planning: Planning, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(memory, "usable_bytes", lambda: 10 * GB)
    result = CliRunner().invoke(app, ["plan", "list"])
    assert result.exit_code == 0 and not planning.arguments
    page = " ".join(result.stdout.split())
    assert max(map(len, result.stdout.splitlines())) <= columns
    small, large, refused = map(known_sizes().__getitem__, ("Qwen/Qwen3-8B", LARGEST, REFUSED))
    for name, size, verdict in (("Qwen/Qwen3-8B", small, "yes"), (LARGEST, large, "not enough RAM")):
        row = page.partition(f"{name} ")[2].partition(" meta-llama" if name == LARGEST else " Qwen/")[0]
        assert f"{size.least_ram / 1e9:.1f} GB" in row and verdict in row
    assert "10.0 GB of RAM are usable here" in page
    assert f"cannot run: {refused.refused}." in page
    result = CliRunner().invoke(app, ["plan", "list", "--json"])
    found = {each.pop("name"): each for each in json.loads(result.stdout)}
    assert set(found) == {name for names in model_groups() for name in names}
    assert found["Qwen/Qwen3-8B"]["bytes"] == 16_381_607_936
    assert {name: each["runs"] for name, each in found.items()}[LARGEST] is False
    none = found[REFUSED]
    assert (none["runs"], none["bytes"]) == (False, None) and "deepseek_v4" in none["refused"]


def test_improvements_are_sorted_and_useless_ones_omitted(plan: Call, planning: Planning) -> None:
    made = small()
    gain = WhatIf("1.00 GB more RAM", 1.2 * made.forecast.tok_per_s, "9 more layers stay")
    planning.plan = replace(made, what_ifs=(*made.what_ifs[1:], gain))
    page = plan().stdout.partition("Possible improvements")[2]
    assert 0 < page.index("4-bit weights") < page.index("1.00 GB more RAM")
    assert "no draft" not in page and "a 2.00 GB budget" not in page
    planning.plan = replace(made, what_ifs=made.what_ifs[2:])
    assert "What would help" not in plan().stdout


@pytest.mark.parametrize(
    ("columns", "made"), zip((40, 50, 63, 64, 72, 80, 100, 120, 200), cycle((small, large, several)))
)
def test_page_of_any_width(plan: Call, planning: Planning, columns: int, made: Callable[[], Plan]) -> None:
    planning.plan = made()
    result = plan("--validate", columns=columns)
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= columns
    assert not any(line != line.rstrip() for line in lines)
    assert "\x1b" not in result.stdout and "…" not in result.stdout
    text = " ".join(result.stdout.split())
    speeds = ("33.0", "4.12", "45.0", "3.04 GB") if made is several else ()
    memory = "GB of 2" if made is large else "2.68 GB of 3.00 GB"
    for figure in ("seconds 0.", memory, "1.35", "1.38", *speeds):
        assert figure in text


def test_page_in_ascii(planning: Planning) -> None:
    from io import BytesIO, TextIOWrapper

    from rich.console import Console

    from offspec.ui.cli.plan_page import render

    console = Console(file=TextIOWrapper(BytesIO(), encoding="ascii"), width=80)
    assert render(console, large(), validation()).isascii()


def test_colours_on_a_terminal_unless_disabled() -> None:
    from io import StringIO

    from rich.console import Console

    from offspec.ui.cli.plan_page import render

    def page(**options: Any) -> str:
        return render(Console(file=StringIO(), force_terminal=True, width=80, **options), small())

    assert "\x1b[32m" in page(color_system="standard", no_color=False)
    assert "\x1b[3" not in page(color_system="standard", no_color=True)


def test_foreign_names_cannot_control_the_terminal(plan: Call, planning: Planning) -> None:
    planning.plan = replace(
        small(),
        target="[red]x[/]\x1b[2J",
        notes=("[bold]n[/]\x07",),
        parts=(Part("[dim]p[/]\x1b", "device", 5),),
        what_ifs=(WhatIf("[i]w[/]\x1b", 100.0, "[b]\x1b"),),
    )
    page = plan().stdout
    assert all(name in page for name in ("[red]x[/]�", "[bold]n[/]�", "[dim]p[/]�", "[i]w[/]�", "[b]�"))


def test_a_plan_without_a_draft_or_a_sweep(plan: Call, planning: Planning) -> None:
    planning.plan = replace(
        small(), draft="none", draft_mode="none", draft_bits=16, budget=1, sweep=(), what_ifs=(), notes=()
    )
    page = plan().stdout
    assert "Without a draft, every pass yields one token." in page
    assert not any(
        word in page for word in ("Speed against", "What would help", "Notes", "step of the draft")
    )


def test_many_layers_wrap(plan: Call, planning: Planning) -> None:
    placement = replace(small().placement, tiers=(Tier.DISK, Tier.DEVICE) * 63)
    planning.plan = replace(small(), placement=placement)
    lines = plan().stdout.splitlines()
    assert any(line.startswith("    0 ░█░█") and line.endswith(" 69") for line in lines)
    assert any(line.startswith("   70 ░█░█") and line.endswith(" 125") for line in lines)


def test_validation_as_json(plan: Call) -> None:
    value = json.loads(plan("--json", "--validate").stdout)
    assert Plan.from_json(value["plan"]) == small()
    assert value["seconds_per_pass"] == {
        "predicted": 1.35,
        "measured": 1.38,
        "error": pytest.approx(0.03 / 1.38),
    }
    assert value["tok_per_s"].keys() == {"predicted", "measured", "error"}
    assert len(value["rows"]) == 3


def test_validation_as_a_table(plan: Call) -> None:
    page = plan("--validate").stdout
    assert "  Write a poem ab...       1.35      1.38   2.2%       7.26      6.60  10.0%" in page
    assert "  median                   1.35      1.38   2.2%       7.26      6.60  10.0%" in page
    assert "tok/pass" in plan("--validate", columns=120).stdout


def test_saved_plan_can_be_loaded(plan: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = plan("--save", str(tmp_path / "plan.json"), "--json")
    assert result.stdout.count("\n") == 1 and Plan.from_text(result.stdout) == small()
    assert result.stderr.splitlines()[-1] == f"plan written to {tmp_path / 'plan.json'}"
    assert Plan.from_text((tmp_path / "plan.json").read_text()) == small()
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]

    def full(*_: object) -> None:
        raise DiskFullError("the disk filled up: make room there")

    monkeypatch.setattr("offspec.ui.cli.plan.write_atomic", full)
    result = plan("--save", str(tmp_path / "plan.json"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1] == "error: the disk filled up: make room there"


def test_failed_validation_keeps_the_saved_plan(plan: Call, planning: Planning, tmp_path: Path) -> None:
    for fails, code, message in (
        (CapacityError("too little", needed=2, given=1), 1, "error: too little"),
        (KeyboardInterrupt(), 130, "stopped"),
    ):
        planning.fails = fails
        result = plan("--validate", "--save", str(tmp_path / "plan.json"))
        assert (result.exit_code, result.stdout, result.stderr.splitlines()[-1]) == (code, "", message)
        assert Plan.from_text((tmp_path / "plan.json").read_text()) == small()
