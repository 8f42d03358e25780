"""One function chooses the draft, for runs here and for plans for other hardware."""

from pathlib import Path

import pytest

from offspec.core.config import EngineConfig
from offspec.draft.known_drafts import KnownDraft
from offspec.engine.calibration_run import make_plan
from offspec.plan.auto_draft import is_hub_model, may_download_drafts
from offspec.plan.load import open_models
from offspec.plan.other_hardware import plan_for_hardware
from offspec_planners.hardware_rates import preset
from tests.support.tiny_models import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("models") / "target"))


@pytest.mark.exhaustive
def test_runs_and_plans_choose_the_same_draft(folder: str) -> None:
    config = EngineConfig(folder, memory=2 * 10**9, learn=False)
    opened = open_models(config, lambda event: None)
    opened.close()
    assert opened.config.drafts == ("self", "suffix")
    here = make_plan(config, replan=True)
    notes = " ".join(here.notes)
    assert "selects self with suffix, for this plan and for a run" in notes or "left out" in notes
    elsewhere = plan_for_hardware(config, preset("desktop-32gb"))
    assert elsewhere.draft in ("self", "none")  # none, if the model alone is faster


SMALL = (KnownDraft("org/small", "model", "small", "org/target", 0.1),)


@pytest.mark.parametrize(
    ("model", "known", "here", "reachable", "fetches", "asked"),
    [
        ("org/name", SMALL, False, True, True, 1),
        ("hf.co/org/name-GGUF:Q4_K_M", SMALL, False, True, True, 1),
        ("org/name", SMALL, False, False, False, 1),
        ("org/name", SMALL, True, True, False, 0),  # local models are used even then
        ("org/name", (), False, True, False, 0),
        ("demo", SMALL, False, True, False, 0),
        ("./folder", SMALL, False, True, False, 0),
    ],
)
def test_small_models_are_downloaded_only_for_hub_models(
    model: str, known: tuple[KnownDraft, ...], here: bool, reachable: bool, fetches: bool, asked: int
) -> None:
    calls = list[str]()

    def is_reachable() -> bool:
        calls.append("hub")
        return reachable

    assert may_download_drafts(model, known, lambda name: here, is_reachable) == fetches
    assert len(calls) == asked


def test_folder_named_like_a_hub_model_is_not_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_hub_model("org/name")
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_hub_model("org/name")
