"""Heads in pickles: what asks for more than tensors is not opened, nor what takes too much room."""

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec.core.errors import DraftError
from offspec.draft.heads import pickles
from tests.support.heads_files import medusa_tensors, opening_fails


class Hostile:
    """What a pickle can be: unpickled by the usual loader, it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., int], tuple[str]]:
        return os.system, (f"touch {self.file}",)


def test_a_pickle_that_wants_to_run_code_does_not(tmp_path: Path) -> None:
    mark = tmp_path / "it ran".replace(" ", "_")
    content = {**medusa_tensors(1), "more": Hostile(mark)}
    torch.save(content, tmp_path / "zipped.pt")
    torch.save(content, tmp_path / "older.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "bare.pt").write_bytes(pickle.dumps(Hostile(mark)))
    for file in ("zipped.pt", "older.pt", "bare.pt"):
        error = opening_fails(tmp_path / file)
        assert isinstance(error, DraftError)
        assert "run code" in str(error) and "convert it to safetensors" in str(error)
    assert not mark.exists()
    pickle.loads((tmp_path / "bare.pt").read_bytes())  # it would have
    assert mark.exists()


@pytest.mark.parametrize("part", ["data.pkl", "data/0"])
def test_a_zip_that_unpacks_to_more_than_it_is(tmp_path: Path, part: str) -> None:
    torch.save(medusa_tensors(1), tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "bomb.pt", "w") as bomb:
        for entry in plain.infolist():
            packed = zipfile.ZIP_DEFLATED if entry.filename.endswith(part) else zipfile.ZIP_STORED
            bomb.writestr(entry.filename, plain.read(entry), packed)
    error = opening_fails(tmp_path / "bomb.pt")
    assert isinstance(error, DraftError) and part in str(error)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickles_that_would_take_too_much_are_not_read(
    tmp_path: Path, zipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickles, "_LARGEST_PICKLE" if zipped else "_LARGEST_OLDER", 100)
    torch.save(medusa_tensors(1), tmp_path / "head.pt", _use_new_zipfile_serialization=zipped)
    error = opening_fails(tmp_path / "head.pt")
    assert isinstance(error, DraftError) and ("large" if zipped else "convert it to safetensors") in str(
        error
    )


def test_a_pickled_module_is_not_opened(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    assert "torch.nn.modules.linear.Linear" in str(opening_fails(tmp_path / "module.pt"))


@pytest.mark.parametrize("content", [[torch.zeros(2)], {"a": 1}, {1: torch.zeros(2)}, torch.zeros(2)])
def test_a_pickle_without_named_tensors(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "list.pt")
    assert "holds no tensors by name" in str(opening_fails(tmp_path / "list.pt"))
