"""The keys of an index go with the keys and values of their layer."""

import torch

from offspec.model.cache import TreeCache


def _append(cache: TreeCache, numbers: range) -> torch.Tensor:
    rows = torch.tensor([*numbers], dtype=torch.float32)[None, :, None]
    cache.rows[0].update(rows[:, None], rows[:, None].expand(1, 2, -1, 3))
    return cache.update_indexer(rows.expand(1, -1, 5), 0)


def test_commit_rewind_and_growth() -> None:
    cache = TreeCache(1, 4)
    assert _append(cache, range(6)).shape == (1, 6, 5)
    cache.commit(3, [0, 2])
    assert _append(cache, range(10, 12))[0, :, 0].tolist() == [0, 1, 2, 3, 5, 10, 11]
    cache.commit(2, [])
    cache.rewind(4)
    assert _append(cache, range(20, 40))[0, :, 0].tolist() == [0, 1, 2, 3, *range(20, 40)]
    assert cache.row_sizes == (1 + 2 * 3 + 5,)


def test_padding_is_not_kept() -> None:
    cache = TreeCache(1, 8)
    cache.padding = 2
    assert _append(cache, range(6))[0, :, 0].tolist() == [0, 1, 2, 3]


def test_what_is_adopted_has_them() -> None:
    target, draft = TreeCache(1, 8), TreeCache(1, 2)
    _append(target, range(5))
    _append(draft, range(50, 52))
    target.commit(5, [])
    draft.commit(2, [])
    draft.adopt(1, target.committed(1))
    assert _append(draft, range(9, 10))[0, :, 0].tolist() == [50, 1, 2, 3, 4, 9]
