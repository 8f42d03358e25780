"""A rounded draft in the cache: it is the one that was rounded, and where it cannot be kept, that is told."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec.core.cache_dir import ROUNDED
from offspec.core.errors import DiskFullError, StreamError
from offspec.core.events import Event, Notice
from offspec.model.attention import TreeContext
from offspec.model.loaded import LoadedModel
from offspec.model.quantize import kept as module
from offspec.model.quantize import resident_layers
from offspec.model.quantize.kept import KeptRounding
from offspec.model.quantize.rounding import round_matrix
from offspec.plan import load_drafts
from tests.support.tiny_models import nothing, open_model, write_model

IDS = torch.arange(3, 40)
SIZES = {"hidden_size": 64, "intermediate_size": 128}


Kept = Callable[..., KeptRounding]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OFFSPEC_CACHE", str(tmp_path / "cache"))
    return write_model(tmp_path / "model", **SIZES)


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def kept(folder: Path, told: list[str]) -> Kept:
    def make(
        model: LoadedModel, fingerprint: str = "print", bits: int = 4, name: str = "a/model"
    ) -> KeptRounding:
        def hear(event: Event) -> None:
            assert isinstance(event, Notice)
            told.append(event.text)

        layers = [binder.parameters for binder in model.layers]
        return KeptRounding(name, fingerprint, bits, layers, ("float32", "cpu"), hear)

    return make


def states(model: LoadedModel) -> torch.Tensor:
    """What the rounded model computes, as its bits are."""
    context = TreeContext.chain(len(IDS), torch.device("cpu"))
    with torch.no_grad():
        found = model.tree_model.hidden(IDS, context)
    model.tree_model.cache.rewind(0)
    model.close()
    return found


def run(folder: Path, kept: Kept | None, bits: int = 4, expand: bool = True) -> torch.Tensor:
    model = open_model(folder)
    where = None if kept is None else kept(model, bits=bits)
    model.load_rounded(bits, expand, 64, nothing, IDS.tolist(), kept=where)
    return states(model)


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bits of each matrix that is rounded."""
    found = list[int]()

    def counted(weight: torch.Tensor, bits: int, importance: torch.Tensor | None) -> object:
        found.append(bits)
        return round_matrix(weight, bits, importance)

    monkeypatch.setattr(resident_layers, "round_matrix", counted)
    return found


@pytest.mark.parametrize(("bits", "expand"), [(4, True), (3, False)])
def test_what_is_read_is_what_was_rounded(
    folder: Path, kept: Kept, told: list[str], rounds: list[int], bits: int, expand: bool
) -> None:
    plain = run(folder, None, bits, expand)
    first = run(folder, kept, bits, expand)
    assert rounds and f"in {bits} bits is kept in" in told[0]
    rounds.clear()
    again = run(folder, kept, bits, expand)
    other_way = run(folder, kept, bits, not expand)
    assert not rounds and len(told) == 1
    assert torch.equal(plain, first) and torch.equal(plain, again) and torch.equal(plain, other_way)


def test_weights_and_bits_name_a_rounding_and_not_the_model(
    folder: Path, kept: Kept, rounds: list[int]
) -> None:
    first = run(folder, kept)
    rounds.clear()
    assert torch.equal(run(folder, partial(kept, name="b/renamed")), first) and not rounds
    assert len(folders(folder)) == 1
    model = open_model(folder)
    assert kept(model).is_there()
    assert not kept(model, bits=3).is_there() and not kept(model, "other weights").is_there()
    model.close()


def test_what_is_damaged_is_made_again(folder: Path, kept: Kept, rounds: list[int]) -> None:
    first = run(folder, kept)
    (file, *_) = sorted((folder.parent / "cache" / ROUNDED).glob("*/*.safetensors"))
    file.write_bytes(file.read_bytes()[:-7])
    rounds.clear()
    assert torch.equal(run(folder, kept), first) and rounds
    rounds.clear()
    assert torch.equal(run(folder, kept), first) and not rounds


def folders(model: Path) -> list[Path]:
    """What is kept, whole or not."""
    return [path for path in (model.parent / "cache" / ROUNDED).iterdir() if path.is_dir()]


def refuse(*_: object) -> None:
    raise DiskFullError("the disk is full: make room")


def break_off(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("name", "failing", "why"),
    [
        ("require_space", refuse, "the rounded draft is not kept, so the next start"),
        ("SafetensorsWriter", break_off, "the rounded draft is not kept, so the next start"),
        ("", None, "cannot write to"),
    ],
    ids=["no room", "a full disk", "no folder"],
)
def test_what_cannot_be_kept_is_told_and_the_draft_is_rounded(
    folder: Path,
    kept: Kept,
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    failing: Any,
    why: str,
) -> None:
    if failing is None:
        (folder.parent / "cache").write_text("not a folder")
    else:
        monkeypatch.setattr(module, name, failing)
    assert torch.equal(run(folder, kept), run(folder, None))
    assert len(told) == 1 and why in told[0]
    assert failing is None or not folders(folder)


def test_an_error_of_the_model_is_not_taken_for_one_of_the_cache(
    folder: Path, kept: Kept, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StreamError("cannot be read", file="file", offset=0)

    monkeypatch.setattr(resident_layers, "round_matrix", fail)
    model = open_model(folder)
    with pytest.raises(StreamError):
        model.load_rounded(4, True, 64, nothing, IDS.tolist(), kept=kept(model))
    model.close()
    assert not told and not folders(folder)


def test_the_engine_keeps_its_substitute(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rounds: list[int]
) -> None:
    import offspec

    monkeypatch.setattr(load_drafts, "LEAST", 0)
    params = offspec.SamplingParams(max_tokens=8)
    texts = []
    for _ in range(2):
        with offspec.load(
            str(folder), draft="substitute", dtype="float32", budget=8, width=2, context=128, learn=False
        ) as engine:
            texts.append((engine.generate([5, 6, 7], params).token_ids, len(rounds)))
    assert texts[0] == texts[1] and rounds
