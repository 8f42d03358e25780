"""Cache of quantized drafts: contents, damage, and errors of writing."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec.core.cache_dir import QUANTIZED
from offspec.core.errors import DiskFullError, StreamError
from offspec.core.events import Event, Notice
from offspec.model.attention import TreeContext
from offspec.model.loaded import LoadedModel
from offspec.model.quantize import draft_cache as module
from offspec.model.quantize import quantized_layers
from offspec.model.quantize.draft_cache import QuantizedDraftCache
from offspec.model.quantize.quantized_matrix import quantize_matrix
from offspec.plan import load_drafts
from tests.support.tiny_models import nothing, open_model, write_model

IDS = torch.arange(3, 40)
SIZES = {"hidden_size": 64, "intermediate_size": 128}


Kept = Callable[..., QuantizedDraftCache]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OFFSPEC_CACHE", str(tmp_path / "cache"))
    return write_model(tmp_path / "model", **SIZES)


@pytest.fixture
def notices() -> list[str]:
    return []


@pytest.fixture
def kept(folder: Path, notices: list[str]) -> Kept:
    def make(
        model: LoadedModel, fingerprint: str = "print", bits: int = 4, name: str = "a/model"
    ) -> QuantizedDraftCache:
        def notify(event: Event) -> None:
            assert isinstance(event, Notice)
            notices.append(event.text)

        layers = [binder.parameters for binder in model.layers]
        return QuantizedDraftCache(name, fingerprint, bits, layers, ("float32", "cpu"), notify)

    return make


def states(model: LoadedModel) -> torch.Tensor:
    """Return the bits of the quantized model's states."""
    context = TreeContext.chain(len(IDS), torch.device("cpu"))
    with torch.no_grad():
        found = model.tree_model.hidden(IDS, context)
    model.tree_model.cache.rewind(0)
    model.close()
    return found


def run(folder: Path, kept: Kept | None, bits: int = 4, expand: bool = True) -> torch.Tensor:
    model = open_model(folder)
    where = None if kept is None else kept(model, bits=bits)
    model.load_quantized(bits, expand, 64, nothing, IDS.tolist(), kept=where)
    return states(model)


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the bits of each quantized matrix."""
    found = list[int]()

    def counted(weight: torch.Tensor, bits: int, importance: torch.Tensor | None) -> object:
        found.append(bits)
        return quantize_matrix(weight, bits, importance)

    monkeypatch.setattr(quantized_layers, "quantize_matrix", counted)
    return found


@pytest.mark.parametrize(("bits", "expand"), [(4, True), (3, False)])
def test_cached_layers_equal_the_quantized_ones(
    folder: Path, kept: Kept, notices: list[str], rounds: list[int], bits: int, expand: bool
) -> None:
    plain = run(folder, None, bits, expand)
    first = run(folder, kept, bits, expand)
    assert rounds and f"the {bits}-bit draft was cached in" in notices[0]
    rounds.clear()
    again = run(folder, kept, bits, expand)
    other_way = run(folder, kept, bits, not expand)
    assert not rounds and len(notices) == 1
    assert torch.equal(plain, first) and torch.equal(plain, again) and torch.equal(plain, other_way)


def test_the_cache_key_depends_on_weights_and_bits_not_the_model_name(
    folder: Path, kept: Kept, rounds: list[int]
) -> None:
    first = run(folder, kept)
    rounds.clear()
    assert torch.equal(run(folder, partial(kept, name="b/renamed")), first) and not rounds
    assert len(folders(folder)) == 1
    model = open_model(folder)
    assert kept(model).is_complete()
    assert not kept(model, bits=3).is_complete() and not kept(model, "other weights").is_complete()
    model.close()


def test_a_damaged_cache_is_made_again(folder: Path, kept: Kept, rounds: list[int]) -> None:
    first = run(folder, kept)
    (file, *_) = sorted((folder.parent / "cache" / QUANTIZED).glob("*/*.safetensors"))
    file.write_bytes(file.read_bytes()[:-7])
    rounds.clear()
    assert torch.equal(run(folder, kept), first) and rounds
    rounds.clear()
    assert torch.equal(run(folder, kept), first) and not rounds


def folders(model: Path) -> list[Path]:
    """Return all cached folders, complete or partial."""
    return [path for path in (model.parent / "cache" / QUANTIZED).iterdir() if path.is_dir()]


def refuse(*_: object) -> None:
    raise DiskFullError("the disk is full: make room")


def break_off(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("name", "failing", "why"),
    [
        ("require_space", refuse, "the quantized draft could not be cached, so the next start"),
        ("SafetensorsWriter", break_off, "the quantized draft could not be cached, so the next start"),
        ("", None, "cannot write to"),
    ],
    ids=["no room", "a full disk", "no folder"],
)
def test_a_cache_that_cannot_be_written_is_reported_and_the_draft_is_quantized(
    folder: Path,
    kept: Kept,
    notices: list[str],
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
    assert len(notices) == 1 and why in notices[0]
    assert failing is None or not folders(folder)


def test_an_error_of_the_model_is_not_reported_as_a_cache_error(
    folder: Path, kept: Kept, notices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StreamError("cannot be read", file="file", offset=0)

    monkeypatch.setattr(quantized_layers, "quantize_matrix", fail)
    model = open_model(folder)
    with pytest.raises(StreamError):
        model.load_quantized(4, True, 64, nothing, IDS.tolist(), kept=kept(model))
    model.close()
    assert not notices and not folders(folder)


def test_the_engine_caches_its_self_draft(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rounds: list[int]
) -> None:
    import offspec

    monkeypatch.setattr(load_drafts, "LEAST", 0)
    params = offspec.SamplingParams(max_tokens=8)
    texts = []
    for _ in range(2):
        with offspec.load(
            str(folder), draft="self", dtype="float32", budget=8, width=2, context=128, learn=False
        ) as engine:
            texts.append((engine.generate([5, 6, 7], params).token_ids, len(rounds)))
    assert texts[0] == texts[1] and rounds
