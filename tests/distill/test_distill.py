"""Training a head into a folder, with interruptions and errors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec.core import memory
from offspec.core.config import EngineConfig
from offspec.core.errors import CapacityError, CheckpointError, DiskFullError, RequestError
from offspec.core.events import Event, LoadProgress, Notice, ignore_event
from offspec.distill import distill_head
from offspec.distill.config import KINDS, LEAST_TOKENS, DistillConfig, Kind, TimeLimit
from offspec.draft.heads.base import TargetShape
from offspec.draft.heads.open import open_head
from tests.support.exhaustive import sampled_params
from tests.support.tiny_models import write_model

KINDS_LISTED: list[Kind] = ["medusa", "mlp", "eagle3"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target"), spread=0.2)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(f"w{i} w{i + 1} w{3 + i % 7}" for i in range(4, 60)))
    return file


def wanted(model: Path, out: Path, kind: Kind = "medusa", **given: Any) -> DistillConfig:
    return DistillConfig(
        str(model), kind, out, **{"tokens": 1200, "length": 16, "epochs": 2, "depth": 2, **given}
    )


def distil(
    what: DistillConfig, prompts: Path, notify: Callable[[Event], None] = ignore_event, **given: Any
) -> Any:
    cache = prompts.parent / "cache"
    return distill_head.distill_head(
        what, prompts=prompts, dtype="float32", notify=notify, cache_dir=cache, **given
    )


def weights(out: Path) -> bytes:
    (file,) = out.glob("*.safetensors")
    return file.read_bytes()


def test_heads_are_made_that_open(model: Path, prompts: Path, tmp_path: Path) -> None:
    """Text that was generated for one head is reused for the next."""
    for kind in KINDS_LISTED:
        out, stages = tmp_path / "deep" / kind, list[str]()

        def hear(event: Event, stages: list[str] = stages) -> None:
            stages.append(event.stage if isinstance(event, LoadProgress) else getattr(event, "text", ""))

        made = distil(wanted(model, out, kind), prompts, hear)
        assert (made.folder, made.kind) == (out, kind)
        assert made.tokens >= 1200 and made.measured.rows > 0 and made.trained.epochs == 2
        assert 1 <= made.measured.expected <= 3
        assert json.loads((out / "config.json").read_text())["base_model_name_or_path"] == str(model)
        target = TargetShape("target", 32, 96, 3, torch.float32, torch.device("cpu"), None)
        opened = open_head(str(out), target, ignore_event)
        assert opened is not None and (kind == "eagle3" or "(2 heads)" in opened.name)
        first = kind == KINDS_LISTED[0]
        assert any(stage.endswith("writes text") for stage in stages) == first
        assert any("of text from an earlier run are reused" in stage for stage in stages) != first
        assert "training" in stages
    assert not list((tmp_path / "cache").rglob("*.pt")), "nothing is left but the text"


@pytest.mark.parametrize("stage", sampled_params(["writes text", "training"], "training"))
def test_the_same_command_resumes_after_an_interrupt(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    monkeypatch.setattr(distill_head, "_BATCHES", (8,))
    distil(wanted(model, tmp_path / "whole"), prompts)
    prompts = _moved(prompts, tmp_path / "elsewhere")

    def stop(event: Event) -> None:
        # Not at the first event: by then a batch is complete.
        if isinstance(event, LoadProgress) and event.stage.endswith(stage) and event.done > event.total // 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distil(wanted(model, tmp_path / "parts"), prompts, stop)
    assert not (tmp_path / "parts").exists()
    notices: list[str] = []
    distil(
        wanted(model, tmp_path / "parts"),
        prompts,
        lambda event: notices.append(event.text) if isinstance(event, Notice) else None,
    )
    kept = (
        "of text from an earlier run are reused"
        if stage == "writes text"
        else "resumes where it was interrupted"
    )
    assert any(kept in notice for notice in notices)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


def _moved(prompts: Path, folder: Path) -> Path:
    """Return the same settings with another cache."""
    folder.mkdir()
    copy = folder / prompts.name
    copy.write_text(prompts.read_text())
    return copy


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "hydra"}, "unknown kind of head 'hydra': use one of medusa, mlp, eagle3"),
        ({"tokens": 999}, "are not enough to train on"),
        ({"depth": 0}, "depth must be 1 or more"),
        ({"epochs": 0}, "epochs must be 1 or more"),
        ({"length": 3}, "length must be 16 or more"),
        ({"minutes": 0.0}, "minutes must be above 0"),
    ],
)
def test_invalid_settings(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        wanted(tmp_path, tmp_path / "out", **given)
    assert tuple(KINDS_LISTED) == KINDS


def test_an_existing_folder_is_left_alone(model: Path, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(RequestError, match="exists already"):
        distil(wanted(model, tmp_path / "out"), prompts)
    with pytest.raises(CheckpointError, match="cannot write to"):
        distil(wanted(model, tmp_path / "out" / "mine" / "head"), prompts)


def test_bad_prompts(model: Path, tmp_path: Path) -> None:
    for name, text in (("a.txt", "\n \n"), ("b.jsonl", '{"text": "w5"}'), ("c.jsonl", "no json")):
        (tmp_path / name).write_text(text)
        with pytest.raises(RequestError, match="prompt"):
            distil(wanted(model, tmp_path / "out"), tmp_path / name)
    with pytest.raises(RequestError, match="cannot read prompts"):
        distil(wanted(model, tmp_path / "out"), tmp_path / "absent.txt")
    (tmp_path / "long.txt").write_text("w5 " * 600)
    with pytest.raises(RequestError, match="longer than 512 tokens"):
        distil(wanted(model, tmp_path / "out"), tmp_path / "long.txt")


def test_a_full_disk_is_one_line(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offspec.distill import store

    def full(folder: Path, needed: int, purpose: str) -> None:
        raise DiskFullError(f"{purpose} needs more")

    monkeypatch.setattr(store, "require_space", full)
    with pytest.raises(DiskFullError, match="the text and the states"):
        distil(wanted(model, tmp_path / "out"), prompts)


def test_a_promise_of_too_little_memory(model: Path, prompts: Path, tmp_path: Path) -> None:
    with pytest.raises(CapacityError):
        distil(wanted(model, tmp_path / "out"), prompts, memory=1_000_000)


def test_the_memory_of_training_counts_in_the_error_of_a_target_that_does_not_fit(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = memory.resident_bytes() + 2**29

    def too_small(settings: EngineConfig, notify: object) -> None:
        assert settings.memory is not None
        raise CapacityError("give more `context`", needed=settings.memory + 5, given=settings.memory)

    monkeypatch.setattr(distill_head, "open_and_load", too_small)
    with pytest.raises(
        CapacityError, match=r"^training the head needs .* are allowed: raise `memory`$"
    ) as caught:
        distil(wanted(model, tmp_path / "out"), prompts, memory=given)
    assert caught.value.given == given == caught.value.needed - 5


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_training_that_does_not_fit_is_refused_before_text_is_written(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    given = memory.resident_bytes() + 2**29
    monkeypatch.setattr(distill_head, "_WEIGHT", 2**20)  # bytes per weight, to simulate a larger head
    with pytest.raises(CapacityError, match=r"training the head needs .* are allowed: raise `memory`, or"):
        distil(wanted(model, tmp_path / "out", kind), prompts, memory=given)
    assert not [file for file in (tmp_path / "cache").rglob("*") if file.is_file() and file.stat().st_size]


class Clock:
    """A clock that advances by some seconds whenever it is read."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_the_time_of_a_whole_run_is_divided() -> None:
    clock = Clock(0.0)
    limit = TimeLimit(2.0, clock)
    clock.now = 20.0  # the model was opened
    limit.begin_text()
    assert not limit.text_time_is_up and limit.left == 100
    clock.now = 70.0
    assert limit.text_time_is_up and limit.training_minutes() == pytest.approx(0.85 * 50 / 60)
    clock.now = 125.0
    with pytest.raises(RequestError, match="training could start only after 2 min; give 5 minutes"):
        limit.training_minutes()
    assert TimeLimit(None, clock).training_minutes() is None and not TimeLimit(None, clock).text_time_is_up


@pytest.mark.exhaustive
def test_a_limit_cuts_text_and_training_and_a_head_comes_out(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    told: list[str] = []
    made = distil(
        wanted(model, tmp_path / "head", tokens=10**6, epochs=1000, length=64, minutes=2.0),
        prompts,
        lambda event: told.append(event.text) if isinstance(event, Notice) else None,
        limit=TimeLimit(2.0, Clock(1.5)),
    )
    assert LEAST_TOKENS <= made.tokens < 10**6 and made.measured.rows > 0 and made.trained.steps > 0
    assert any("out of time for text" in text for text in told)
    assert (tmp_path / "head" / "config.json").exists()


def test_a_limit_that_is_too_short_names_the_required_time(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    short = wanted(model, tmp_path / "head", tokens=10**6, minutes=1.0)
    with pytest.raises(RequestError, match=r"too short for 1000 tokens of text: .* give \d+ minutes or more"):
        distil(short, prompts, limit=TimeLimit(1.0, Clock(8.0)))
    assert not (tmp_path / "head").exists()
