"""The cache: appending, committing and rewinding rows and index keys, in one allocation."""

from pathlib import Path

import pytest
import torch

from offspec.model.attention import TreeContext
from offspec.model.cache import TreeCache
from offspec.model.cache_block import CacheBlock
from offspec.model.fused.model import FusedModel
from tests.support.tiny_models import HYBRIDS, load_all, open_model, write_hybrid, write_model

CPU = torch.device("cpu")
PROMPT = torch.tensor([5, 9, 17, 33, 64, 20, 21, 22, 9])


@pytest.mark.parametrize("family", ["deepseek_v3", "gemma4_text", "zamba2"])
def test_all_layers_share_one_block(family: str, tmp_path: Path) -> None:
    write = write_hybrid if family in HYBRIDS else write_model
    model = open_model(write(tmp_path, family))
    load_all(model, 16)
    cache = model.tree_model.cache
    cache.block.allocate()
    with torch.no_grad():
        model.tree_model.hidden(PROMPT, TreeContext.chain(len(PROMPT), model.device))
    stores = [store for layer in cache.rows for store in layer.stores]
    storages = {store.untyped_storage().data_ptr(): store.untyped_storage() for store in stores}
    assert len(storages) == 1 and len(stores) > 1
    (storage,) = storages.values()
    assert model.cache_bytes(16) <= storage.nbytes() <= model.cache_bytes(16) + 320 * len(cache.rows)
    first = [store.data_ptr() for store in stores]
    assert len(set(first)) == len(first) and not any(place % 64 for place in first)
    model.close()


def test_rows_in_a_block_do_not_overlap() -> None:
    """Layers of different shapes, one of them with an index, that fill up and then grow out of the block."""
    sizes = [(2, 3, 5), (1, 4, 2)]
    cache = TreeCache(2, 4, CacheBlock({CPU: (4 * 4 * (2 * 3 + 2 * 5 + 4 + 2 + 7), 5)}))
    kept: list[list[torch.Tensor]] = []
    for count in (3, 1, 5):
        kept.append([])
        for layer, (heads, size, width) in zip(cache.rows, sizes, strict=True):
            key, value = torch.randn(1, heads, count, size), torch.randn(1, heads, count, width)
            layer.update(key, value)
            kept[-1] += [key, value]
        index = torch.randn(1, count, 7)
        cache.rows[1].update_indexer(index)
        kept[-1].append(index[:, None])
        stores = [store for layer in cache.rows for store in layer.stores]
        assert len({store.untyped_storage().data_ptr() for store in stores}) == (1 if len(kept) < 3 else 5)
        for store, rows in zip(stores, zip(*kept, strict=True), strict=True):
            whole = torch.cat(rows, dim=2)
            assert torch.equal(store[:, :, : whole.shape[2]], whole)


def test_rows_that_do_not_fit_the_block_are_allocated_separately() -> None:
    cache = TreeCache(1, 4, CacheBlock({CPU: (100, 0)}))
    rows = torch.randn(1, 2, 3, 8)
    keys, values = cache.rows[0].update(rows, -rows)
    assert torch.equal(keys, rows) and torch.equal(values, -rows)


def test_a_fused_draft_has_no_second_block(tmp_path: Path) -> None:
    """Rows of the replaced model are never allocated, or freed before the fused model allocates its own."""
    model = open_model(write_model(tmp_path))
    load_all(model, 16)
    before = model.tree_model
    with torch.no_grad():
        before.hidden(PROMPT, TreeContext.chain(len(PROMPT), model.device))
    assert isinstance(model.fused_model(16), FusedModel)
    assert not any(layer.stores for layer in before.cache.rows)
    model.close()


def _append(cache: TreeCache, rows: torch.Tensor) -> None:
    """Rows [T] as keys and negated values of every layer."""
    for layer in cache.rows:
        layer.update(rows.view(1, 1, -1, 1), -rows.view(1, 1, -1, 1))


def _content(cache: TreeCache) -> list[float]:
    layer = cache.rows[1]
    assert layer.keys is not None and layer.values is not None
    assert torch.equal(layer.keys[:, :, : layer.filled], -layer.values[:, :, : layer.filled])
    return [float(x) for x in layer.keys[0, 0, : layer.filled, 0]]


def test_a_cache_appends_commits_rewinds_and_grows() -> None:
    cache = TreeCache(2, capacity=4)
    _append(cache, torch.arange(4.0))
    cache.commit(1, [0, 2])
    assert cache.length == 3 and _content(cache) == [0, 1, 3]
    _append(cache, torch.arange(10.0, 17.0))  # two pending rows and a tree of five, beyond the capacity
    cache.commit(2, [0, 2, 3])
    assert cache.length == 8 and _content(cache) == [0, 1, 3, 10, 11, 12, 14, 15]
    cache.rewind(4)
    _append(cache, torch.tensor([99.0]))
    assert _content(cache) == [0, 1, 3, 10, 99]
    cache.rewind(4)  # a cancelled pass leaves rows that must be dropped
    assert _content(cache) == [0, 1, 3, 10]
    with pytest.raises(AssertionError):
        cache.rewind(5)


def _index(cache: TreeCache, numbers: range) -> torch.Tensor:
    rows = torch.tensor([*numbers], dtype=torch.float32)[None, :, None]
    cache.rows[0].update(rows[:, None], rows[:, None].expand(1, 2, -1, 3))
    return cache.update_indexer(rows.expand(1, -1, 5), 0)


def test_commit_rewind_and_growth() -> None:
    cache = TreeCache(1, 4)
    assert _index(cache, range(6)).shape == (1, 6, 5)
    cache.commit(3, [0, 2])
    assert _index(cache, range(10, 12))[0, :, 0].tolist() == [0, 1, 2, 3, 5, 10, 11]
    cache.commit(2, [])
    cache.rewind(4)
    assert _index(cache, range(20, 40))[0, :, 0].tolist() == [0, 1, 2, 3, *range(20, 40)]
    assert cache.row_sizes == (1 + 2 * 3 + 5,)


def test_padding_is_not_kept() -> None:
    cache = TreeCache(1, 8)
    cache.padding = 2
    assert _index(cache, range(6))[0, :, 0].tolist() == [0, 1, 2, 3]


def test_committed_rows_of_another_cache_include_index_keys() -> None:
    target, draft = TreeCache(1, 8), TreeCache(1, 2)
    _index(target, range(5))
    _index(draft, range(50, 52))
    target.commit(5, [])
    draft.commit(2, [])
    draft.append_committed(1, target.committed(1))
    assert _index(draft, range(9, 10))[0, :, 0].tolist() == [50, 1, 2, 3, 4, 9]
