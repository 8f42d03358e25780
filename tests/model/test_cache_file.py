"""Cache files: every kind of cache is restored bit for bit."""

from pathlib import Path

import pytest
import torch

from offspec.core.errors import CheckpointError
from offspec.model.cache import TreeCache
from offspec.model.cache_block import HostBlock
from offspec.model.cache_file import cache_file_bytes, read_cache, read_cache_header, write_cache
from offspec.model.cache_offload import CacheOffload
from offspec.model.recurrence.snapshots import Snapshot
from offspec.model.recurrence.state import RecurrentState

CPU = torch.device("cpu")
IDS = list(range(7, 18))


def cache_of(kind: str, capacity: int = 16) -> TreeCache:
    if kind.startswith("windowed"):
        windows = CacheOffload(4096, CPU)
        home = HostBlock(1 << 14, 10, pin=False)
        return TreeCache(3, capacity, home, int8="int8" in kind, windows=windows)
    return TreeCache(3, capacity, int8=kind == "int8")


def filled(kind: str) -> TreeCache:
    """Eleven rows in the first and the last layer; the middle layer stores nothing."""
    cache, random = cache_of(kind), torch.Generator().manual_seed(1)
    for layer in (cache.rows[0], cache.rows[2]):
        layer.update(
            torch.randn(1, 2, 14, 6, generator=random, dtype=torch.float32).bfloat16(),
            torch.randn(1, 1, 14, 9, generator=random, dtype=torch.float32).bfloat16(),
        )
    if kind == "index":
        cache.rows[2].update_indexer(torch.randn(1, 14, 5, generator=random).bfloat16())
    if kind == "states":
        for length in (4, 8, 11):
            parts = [torch.randn(3, 2, generator=random), torch.randn(2, 4, 4, generator=random)]
            states = {(1, 0): RecurrentState(*parts), (1, 1): RecurrentState(state=parts[1] + 1)}
            cache.snapshots.add(Snapshot(length, states))
        for place, found in states.items():
            cache._recurrence(*place).committed = found
    cache.commit(0, [])
    cache.length = len(IDS)
    for layer in cache.rows:
        layer.truncate(cache.length)
    return cache


def bits(cache: TreeCache) -> list[torch.Tensor]:
    cache.settle()
    stores = [store[:, :, : cache.length] for row in cache.rows for store in row.stores]
    states = [
        part
        for snapshot in cache.states()
        for _, found in sorted(snapshot.states.items())
        for part in (found.tail, found.state)
        if part is not None
    ]
    return [*stores, *states]


@pytest.mark.parametrize("kind", ["plain", "int8", "windowed", "windowed int8", "index", "states"])
@pytest.mark.parametrize("used", [False, True])
def test_a_cache_file_round_trips(kind: str, used: bool, tmp_path: Path) -> None:
    """Read by an unused cache with less capacity, and by one with other contents."""
    path, cache = tmp_path / "file.safetensors", filled(kind)
    write_cache(path, cache, IDS, "key")
    assert path.stat().st_mode & 0o777 == 0o600
    found = read_cache_header(path, "key")
    assert found.ids.tolist() == IDS and found.nbytes == path.stat().st_size > cache_file_bytes(cache)
    assert found.lengths == ((4, 8, 11) if kind == "states" else ())
    other = filled(kind) if used else cache_of(kind, 8)
    for store in (store for row in other.rows for store in row.stores):
        store.zero_()
    read_cache(found, other, [CPU] * 3, torch.bfloat16)
    assert other.length == len(IDS) and len(bits(other)) == len(bits(cache)) > 3
    for mine, theirs in zip(bits(other), bits(cache), strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    for rows, others in zip(other.committed(3), cache.committed(3), strict=True):
        for one, two in zip(rows or (), others or (), strict=True):
            assert one.dtype == two.dtype == torch.bfloat16
    assert [other.reusable(n) for n in (11, 10, 3)] == [found.reusable(n) for n in (11, 10, 3)]
    assert other.rewind(10) == (8 if kind == "states" else 10)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    write_cache(path, filled("plain"), IDS, "key")
    with pytest.raises(CheckpointError, match="another model"):
        read_cache_header(path, "other")
    for kind in ("int8", "windowed int8"):
        cache = filled(kind)
        with pytest.raises(CheckpointError, match="layer 0 stores"):
            read_cache(read_cache_header(path, "key"), cache, [CPU] * 3, torch.bfloat16)
        assert cache.rewind(0) == cache.length == 0
    with pytest.raises(CheckpointError, match="does not fit"):
        read_cache(read_cache_header(path, "key"), TreeCache(2, 16), [CPU] * 2, torch.bfloat16)


def test_any_changed_byte_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    write_cache(path, filled("int8"), IDS, "key")
    whole = path.read_bytes()
    for place in [9, 100, 4096, *range(4100, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(CheckpointError):
            read_cache(read_cache_header(path, "key"), cache_of("int8"), [CPU] * 3, torch.bfloat16)
    for length in (0, 7, 2000, 4096, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            read_cache_header(path, "key")
