"""Keys and values of a target in the cache of its self-draft: what is copied, and what is not."""

from pathlib import Path

import pytest
import torch

from offspec.draft.forward import DraftModel
from offspec.draft.lm import LMDrafter
from offspec.model.attention import TreeContext
from offspec.model.cache import KeysAndValues, TreeCache
from offspec.model.loaded import LoadedModel
from tests.support.tiny_models import load_all, open_model, write_model

CPU = torch.device("cpu")
TOKENS = torch.arange(3, 23)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[LoadedModel, LoadedModel]:
    folder = write_model(tmp_path / "model")
    target, draft = open_model(folder), open_model(folder)
    load_all(target, 64)
    load_all(draft, 64)
    return target, draft


def _read(model: DraftModel, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        length = model.cache.length
        positions = torch.arange(length, length + len(tokens))
        return model.hidden(tokens, TreeContext(length, positions, len(tokens), torch.empty(0, 0).bool()))


@pytest.mark.parametrize(("lean", "own"), [(False, 20), (True, 0), (True, 5)])
def test_shared_rows_are_attended_to(pair: tuple[LoadedModel, LoadedModel], lean: bool, own: int) -> None:
    """The draft gives the same result as one that processed the text with its own keys and values."""
    target, draft = pair
    model: DraftModel = (draft.fused_model(8) if lean else None) or draft.tree_model
    assert isinstance(model.cache, TreeCache) != lean
    _read(target.tree_model, TOKENS)
    target.tree_model.cache.commit(12, [0, 3])
    drafter = LMDrafter("draft", model, CPU, draft.close, target.tree_model.cache)
    if own:
        _read(model, TOKENS[:own].flip(0))
        model.cache.commit(own, [])
    drafter.adopt_target_cache()
    assert model.cache.length == 14
    mine, theirs = (_read(one, TOKENS[:4]) for one in (model, target.tree_model))
    assert torch.allclose(mine, theirs, atol=1e-4)


def test_only_new_rows_are_copied(
    pair: tuple[LoadedModel, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A separate draft model copies nothing."""
    target, draft = pair
    starts, real = list[int](), TreeCache.committed

    def noted(cache: TreeCache, start: int) -> list[KeysAndValues | None]:
        starts.append(start)
        return real(cache, start)

    monkeypatch.setattr(TreeCache, "committed", noted)
    drafter = LMDrafter("draft", draft.tree_model, CPU, draft.close, target.tree_model.cache)
    for _ in range(2):
        _read(target.tree_model, TOKENS[:6])
        target.tree_model.cache.commit(6, [])
        drafter.adopt_target_cache()
        drafter.adopt_target_cache()
    assert starts == [0, 6]
    target.tree_model.cache.rewind(4)
    drafter.rewind(4)
    drafter.adopt_target_cache()
    _read(target.tree_model, TOKENS[:3])
    target.tree_model.cache.commit(3, [])
    drafter.adopt_target_cache()
    assert starts == [0, 6, 4] and draft.tree_model.cache.length == 7
    LMDrafter("draft", draft.tree_model, CPU, draft.close).adopt_target_cache()
    assert starts == [0, 6, 4] and draft.tree_model.cache.length == 7
