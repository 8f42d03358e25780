"""Cache offload: rows in RAM that pass through two windows give the same results as rows on the device."""

import gc
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec import SamplingParams
from offspec.model.cache import TreeCache
from offspec.model.cache_block import HostBlock
from offspec.model.cache_offload import CacheOffload
from offspec.model.kv_tensors import QuantizedTensor
from offspec_planners.placement import Placement, Tier
from tests.support.poison import poisoned
from tests.support.tiny_models import HYBRIDS, open_model, reference, tiny_engine, write_hybrid, write_model

CPU = torch.device("cpu")
PROMPT = [5, 9, 17, 33, 64, 20, 21, 22, 9]
SHAPES = [(2, 4, 6), (1, 3, 3), (2, 5, 4), (3, 2, 2), (1, 8, 8)]  # heads, numbers of a key and of a value


def appended(cache: TreeCache, layer: int, count: int, seed: int) -> list[torch.Tensor]:
    """Append rows to a layer; return its keys and values."""
    heads, size, width = SHAPES[layer]
    generator = torch.Generator().manual_seed(seed * 10 + layer)
    key = torch.randn(1, heads, count, size, generator=generator)
    value = torch.randn(1, heads, count, width, generator=generator)
    return [rows.clone() for rows in cache.rows[layer].update(key, value)]


@pytest.mark.parametrize(("layers", "int8"), [(1, True), (2, False), (5, True), (5, False)])
def test_any_order_of_passes(layers: int, int8: bool) -> None:
    """Passes in parts, cancelled passes, commits, rewinds, and rows beyond the capacity."""
    rng = random.Random(layers)
    home = HostBlock(100_000, 20, pin=False)
    with poisoned():
        windows = CacheOffload(40 * 4 * 16 + 256, CPU)
        caches = [TreeCache(layers, 40, int8=int8), TreeCache(layers, 40, home, int8=int8, windows=windows)]
    for step in range(80):
        parts = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]
        ran = layers if rng.random() < 0.8 else rng.randrange(layers)
        for layer in range(ran):
            for part, count in enumerate(parts):
                plain, offloaded = (appended(cache, layer, count, 4 * step + part) for cache in caches)
                assert all(map(torch.equal, plain, offloaded)), (step, layer, part)
        if ran == layers:
            pending = rng.randint(0, sum(parts) - 1)
            nodes = sorted(rng.sample(range(sum(parts) - pending), rng.randint(1, sum(parts) - pending)))
            for cache in caches:
                cache.commit(pending, nodes)
        length = caches[0].length
        if ran < layers or rng.random() < 0.3:
            length = rng.randint(length // 2, length)
            for cache in caches:
                cache.rewind(length)
        if rng.random() < 0.2:
            for plain_, apart_ in zip(*(cache.committed(length // 3) for cache in caches), strict=True):
                assert plain_ is not None and apart_ is not None
                for one, other in zip(plain_, apart_, strict=True):
                    assert torch.equal(one.clone(), other.clone())
    assert caches[1].rows[0].capacity > 40, "it has grown"


@pytest.mark.gpu
@pytest.mark.parametrize("layers", [1, 3])
def test_copies_on_a_gpu_wait_for_their_source(layers: int) -> None:
    """Only the cache itself waits for the device, from the first row of a pass to its commit."""
    device = torch.device("cuda")
    home = HostBlock(100_000, 20, pin=True)
    windows = CacheOffload(64 * 4 * 16 + 256, device)
    caches, computed = [TreeCache(layers, 64), TreeCache(layers, 64, home, windows=windows)], list[Any]()
    for step in range(6):
        seen: list[list[torch.Tensor]] = [[], []]
        for cache, found in zip(caches, seen, strict=True):
            for layer in range(layers):
                heads, size, width = SHAPES[layer]
                rows = torch.arange(9.0, device=device)[:, None] + 10 * step
                given = [rows.expand(1, heads, 9, n) * (layer + 1) for n in (size, width)]
                found += [keys.clone() for keys in cache.rows[layer].update(*given)]
            cache.commit(2, [1, 4, 6])
            if step % 2:
                cache.rewind(cache.length - 8)  # more than the latest rows
        computed.append(seen)
    for plain, offloaded in computed:
        assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(plain, offloaded, strict=True))
    for plain, offloaded in zip(*(cache.committed(0) for cache in caches), strict=True):
        assert plain is not None and offloaded is not None
        for one, other in zip(plain, offloaded, strict=True):
            assert torch.equal(one.cpu(), other.cpu())
    caches[1].close()


@pytest.mark.gpu
def test_memory_is_freed_after_all_copies_have_ended() -> None:
    """The next layer's rows are being copied to a window when the cache is closed."""
    device, room = torch.device("cuda"), 16 * 4 * 4 * 2
    home = HostBlock(2 * room, 4, pin=True)
    cache = TreeCache(2, 16, home, windows=CacheOffload(room, device))
    rows = torch.ones(1, 1, 9, 4, device=device)
    for layer in cache.rows:
        layer.update(rows, rows)
    cache.commit(9, [])
    cache.rows[0].update(rows[:, :, :1], rows[:, :, :1])  # and the second layer's are copied
    cache.close()
    del cache, layer
    gc.collect()  # layers and windows refer to each other
    others = [torch.full((room,), 7, dtype=torch.uint8, device=device) for _ in range(4)]
    torch.cuda.synchronize()
    assert all(bool((other == 7).all()) for other in others)


def written(folder: Path, family: str) -> Path:
    return write_hybrid(folder, family) if family in HYBRIDS else write_model(folder, family)


@pytest.mark.parametrize(
    ("family", "int8"),
    [
        ("llama", True),
        ("deepseek_v3", False),
        pytest.param("mimo_v2_flash", True, marks=pytest.mark.exhaustive),
        pytest.param("qwen3_next", False, marks=pytest.mark.exhaustive),
    ],
)
def test_tokens_do_not_depend_on_cache_offload(family: str, int8: bool, tmp_path: Path) -> None:
    """With trees, in chunks, and in a second turn."""
    folder, found = written(tmp_path / "model", family), list[list[Any]]()
    greedy = SamplingParams(max_tokens=12, ignore_eos=True)
    sampled = replace(greedy, temperature=0.8, seed=5)
    count = len(open_model(folder).layers)
    options = {"budget": 5, "chunk": 4} if int8 else {"budget": 24}
    for caches, draft, given in (
        (Tier.DEVICE, "none", {"budget": 1}),
        (Tier.HOST, "suffix" if int8 else "auto", options),
    ):
        placement = replace(Placement.in_memory(count, [0], 2), caches=caches)
        with tiny_engine(folder, draft, placement=placement, int8_cache=int8, **given) as engine:
            answer = engine.generate(PROMPT, greedy).token_ids
            again = engine.generate([*PROMPT, *answer[:7], 40, 41], sampled).token_ids
            found.append([answer, again])
    assert found[0] == found[1]
    assert int8 or list(found[0][0]) == reference(folder, PROMPT, 12)


def test_models_that_support_cache_offload(tmp_path: Path) -> None:
    """Not models whose layers read another layer's rows, which are no longer in a window."""
    known = {"llama": True, "deepseek_v3": True, "gemma3n_text": False, "gemma4_text": False}
    for family, moves in known.items():
        model = open_model(write_model(tmp_path / family, family))
        assert model.can_offload_cache == moves
        model.close()


def test_only_the_windows_are_on_the_device(tmp_path: Path) -> None:
    model = open_model(write_model(tmp_path, num_hidden_layers=6))
    placement = replace(Placement.in_memory(6, range(6), 0), caches=Tier.HOST)
    model.load(placement, 64, lambda done, total: None)
    cache = model.tree_model.cache
    assert isinstance(cache.block, HostBlock) and cache.block.nbytes >= model.cache_bytes(64)
    assert model.offload_buffer_bytes(64) <= model.cache_bytes(64) // 6 + 256
    rows = cache.rows[0].update(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8))
    assert not any(isinstance(one, QuantizedTensor) for one in rows)
    assert {one.untyped_storage().nbytes() for one in rows} == {model.offload_buffer_bytes(64)}
    model.close()
