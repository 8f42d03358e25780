"""`offspec bench`: real answers of a tiny model as a table, Markdown and JSON; comparison of runs."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from offspec.engine import benchmark
from offspec.engine.benchmark import Benchmark, Generation, setting_differences
from offspec.plan.hardware_profile import Profile
from offspec.ui.cli.main import app
from offspec_planners.hardware_rates import preset
from tests.support.tiny_models import disturb, write_model
from tests.ui.cli.program import error_line

Call = Callable[..., Result]
PROMPTS = ("w5 w9 w17", "w3 w8")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and a disturbed copy as the draft."""
    folder = tmp_path_factory.mktemp("models")
    target, draft = write_model(folder / "target"), write_model(folder / "draft")
    disturb(draft)
    return target, draft


@pytest.fixture
def run(models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Call `offspec bench` with short prompts."""
    monkeypatch.setenv("OFFSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(benchmark, "PROMPTS", PROMPTS)
    machine = Profile(preset("laptop-8gb"), "2026-01-01")
    monkeypatch.setattr(benchmark, "profile", lambda device, notify: machine)
    target, draft = map(str, models)
    fixed = ("--draft", draft, "--dtype", "float32", "--budget", "12", "--width", "3")

    def call(*args: str) -> Result:
        options = (*fixed, "--context", "256", "--device", "cpu", *args)
        return CliRunner().invoke(app, ("bench", target, *options), prog_name="offspec")

    return call


def facts(page: str) -> dict[str, str]:
    return {line[:24].strip(): line[24:].strip() for line in page.splitlines()}


def test_table_of_real_answers(run: Call) -> None:
    result = run("--temperature", "0.7")
    assert result.exit_code == 0, result.output
    lines = facts(result.stdout)
    assert lines["GPU"].startswith("NVIDIA") or "RTX" in lines["GPU"]
    assert lines["layers"].endswith("resident") and lines["weights"].startswith("in memory")
    assert "same tokens" in lines["gain"] and "tokens in" in lines["with speculation"]
    assert lines["temperature"] == "0.7" and "predicted" not in lines


def test_runs_agree_only_with_equal_settings(
    run: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "_CLOSE", float("inf"))  # speeds of milliseconds differ
    before = run("--json")
    file = tmp_path / "before.json"
    file.write_text(before.stdout)
    found = json.loads(before.stdout)
    assert len(found["answers"]) == len(PROMPTS) and found["seed"] == 1 and found["same"]
    assert found["drafted"]["tokens"] <= sum(map(len, found["answers"]))
    again = run("--check", str(file), "--markdown")
    assert again.exit_code == 0 and f"matches {file}" in again.stderr
    rows = [line for line in again.stdout.splitlines() if line.startswith("|")]
    assert again.stdout.startswith("offspec ") and rows[1] == "|---|---|---|"
    assert {row.count("|") for row in rows} == {4}
    other = run("--check", str(file), "--temperature", "1.0", "--draft", "none", "--quiet")
    assert other.exit_code == 1
    assert "this run differs from" in error_line(other) and "temperature is 1" in other.stderr
    lines = facts(other.stdout)  # without a draft there is one speed and no speedup
    assert "1.00 tokens" in lines["generation"] and lines["tree"] == "none"
    assert "gain" not in lines and "speculation" not in other.stdout


def test_unmeasured_speed_is_not_zero(run: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "TOKENS_ALONE", 1)  # the first pass is not timed
    result = run()
    assert result.exit_code == 0, result.output
    assert re.search(r"without +unknown +the time limit was too short", result.stdout)
    assert re.search(r"gain +unknown", result.stdout)


@pytest.mark.usefixtures("drafters_stay")
def test_time_limit_ends_the_answers(run: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10**6, 600))
    monkeypatch.setattr("offspec.engine.benchmark.time.monotonic", lambda: float(next(clock)))
    found = json.loads(run("--json", "--seconds", "5").stdout)
    assert len(found["answers"]) == 1, "the first prompt is always answered, as far as it comes"


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, "cannot be read"), ("[1]", "not the output of"), ("\udcff", "not the output of")],
)
def test_invalid_file_is_found_before_loading(
    text: str | None, reason: str, run: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offspec.engine.load.load", None)
    file = tmp_path / "before.json"
    if text is not None:
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
    result = run("--check", str(file))
    assert result.exit_code == 2 and reason in error_line(result)
    assert "omit one" in error_line(run("--json", "--markdown"))


def _run(**changes: Any) -> Benchmark:
    given: dict[str, Any] = {
        "offspec": "1",
        "torch": "2",
        "date": "2026-01-01",
        "machine": {},
        "settings": {"model": "a", "layers": "5 resident"},
        "link": "disk",
        "link_rate": 2e9,
        "prompt_tokens": 512,
        "prompt_seconds": 4.0,
        "drafted": Generation(80, 10, 10.0, 10**10),
        "alone": Generation(7, 7, 7.0, 7 * 10**9),
        "same": True,
        "predicted": None,
        "seed": 1,
        "answers": ((1, 2, 3), (4, 5)),
    }
    return Benchmark(**given | changes)


def test_figures() -> None:
    found = _run()
    assert (found.prompt_tok_per_s, found.speedup, found.link_share) == (128, 8, 0.5)
    assert found.drafted.tokens_per_pass == 8
    assert Benchmark.read(json.dumps(found.to_json()).encode()) == found
    empty = _run(drafted=Generation(), alone=Generation(), link="", prompt_seconds=0)
    assert (empty.speedup, empty.link_share, empty.prompt_tok_per_s) == (0, 0, 0)


def test_disagreements_of_two_runs() -> None:
    assert setting_differences(_run(), _run(answers=((1, 2), (4, 5, 6)), settings={"model": "a"})) == []
    (tokens,) = setting_differences(_run(), _run(answers=((1, 9, 3), (4, 5))))
    assert tokens == "answer 1 differs from token 2 on"
    (speed,) = setting_differences(_run(), _run(drafted=Generation(80, 10, 16.0)))
    assert speed == "with speculation: 5 tok/s (before: 8 tok/s)"
    other_model = setting_differences(_run(), _run(settings={"model": "b", "layers": "5 resident"}))
    assert other_model == ["model is b (before: a)"]


def test_explanations_follow_a_disagreement() -> None:
    streams = {"model": "a", "layers": "5 on disk"}
    speed, layers = setting_differences(_run(), _run(drafted=Generation(80, 10, 16.0), settings=streams))
    assert speed.startswith("with speculation: 5 tok/s")
    assert layers == "layers is 5 on disk (before: 5 resident)"
    sampled = {"model": "a", "temperature": "0.7"}
    seed, tokens = setting_differences(
        _run(settings=sampled), _run(settings=sampled, seed=2, answers=((7,),))
    )
    assert seed == "seed is 2 (before: 1)" and tokens == "answer 1 differs from token 1 on"
    cold = _run(settings=sampled | {"temperature": "0"})
    assert setting_differences(cold, _run(settings=cold.settings, seed=2)) == []


def test_empty_comparison_is_not_agreement() -> None:
    (unknown,) = setting_differences(_run(), _run(alone=Generation()))
    assert unknown == "without speculation: no speed measured in one of the runs; allow more `seconds`"
