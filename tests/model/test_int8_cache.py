"""int8 KV cache: tokens do not depend on tree, tree size, chunks or reuse, and memory is halved."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from offspec import SamplingParams
from offspec.model.attention import TreeContext
from offspec.model.cache import TreeCache
from offspec.model.cache_layer import TreeCacheLayer
from offspec.model.kv_tensors import QuantizedTensor, stored_rows
from offspec_kernels.quantized_rows import QuantizedRows
from tests.support.exhaustive import sampled_params
from tests.support.tiny_models import HYBRIDS, load_all, open_model, tiny_engine, write_hybrid, write_model

PROMPT = [5, 9, 17, 33, 64, 20, 21, 22, 9]


def quantized(rows: torch.Tensor) -> torch.Tensor:
    return QuantizedRows.of(rows).values()


def quantize_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a cache of plain tensors quantize its rows: a plain reference, without saving memory."""
    write = TreeCacheLayer._write

    def narrow(layer: Any, start: int, end: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        write(layer, start, end, quantized(keys), quantized(values))

    monkeypatch.setattr(TreeCacheLayer, "_write", narrow)


def written(folder: Path, family: str) -> Path:
    return write_hybrid(folder, family) if family in HYBRIDS else write_model(folder, family)


def appended(cache: TreeCache, count: int, seed: int) -> Iterator[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    for layer in cache.rows:
        key, value = (
            torch.randn(1, 2, count, 6, generator=random),
            torch.randn(1, 1, count, 9, generator=random),
        )
        yield from (stored for stored in layer.update(key, value))


def test_contents_equal_those_of_a_plain_cache_of_quantized_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Appended, committed, rewound, beyond the capacity, copied to another cache."""
    caches = [TreeCache(2, 6, int8=True), TreeCache(2, 6)]
    steps = [(5, 2, [0, 2], 4), (7, 3, [0, 1, 3], 5), (9, 9, [], 14)]
    for step, (count, pending, nodes, length) in enumerate(steps):
        narrow = list(appended(caches[0], count, step))
        with monkeypatch.context() as patch:
            quantize_rows(patch)
            plain = list(appended(caches[1], count, step))
        for stored, expected in zip(narrow, plain, strict=True):
            assert isinstance(stored, QuantizedTensor) and stored.shape == expected.shape
            assert torch.equal(stored.clone(), expected)
        for cache in caches:
            cache.commit(pending, nodes)
            cache.rewind(length)
    other = TreeCache(2, 3)
    other.append_committed(0, caches[0].committed(0))
    for taken, rows in zip(other.committed(0), caches[1].committed(0), strict=True):
        assert taken is not None and rows is not None
        assert all(map(torch.equal, taken, rows))


def test_model_code_gets_dequantized_values() -> None:
    rows = QuantizedRows.of(torch.randn(1, 2, 5, 4))
    tensor, values = QuantizedTensor(rows), rows.values()
    weight = torch.randn(3, 4)
    assert torch.equal(F.linear(tensor, weight), F.linear(values, weight))
    assert torch.equal(torch.cat([tensor, values], dim=1), torch.cat([values, values], dim=1))
    assert torch.equal(tensor[:, :1].expand(-1, 3, -1, -1), values[:, :1].expand(-1, 3, -1, -1))
    assert type(tensor.transpose(1, 2)) is torch.Tensor and tensor.dtype == torch.float32
    assert stored_rows(tensor) is rows and stored_rows(values) is values


@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3", "gemma3n_text", "zamba2"])
def test_bytes_per_position(family: str, tmp_path: Path) -> None:
    model = open_model(written(tmp_path, family), torch.bfloat16, int8_cache=True)
    load_all(model, 16)
    with torch.no_grad():
        model.tree_model.hidden(torch.tensor(PROMPT), TreeContext.chain(len(PROMPT), model.device))
    stores = [store for row in model.tree_model.cache.rows for store in row.stores]
    assert stores and model.cache_bytes(16) == sum(store.nbytes for store in stores)
    assert len({store.untyped_storage().data_ptr() for store in stores}) == 1
    model.close()


@pytest.mark.parametrize("family", sampled_params(["llama", "mimo_v2_flash", "deepseek_v3"], "llama"))
def test_tokens_equal_those_of_a_plain_cache_of_quantized_rows(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With trees, one token per pass, in chunks, and with the cache of a first answer."""
    folder = written(tmp_path / "model", family)
    requests = [
        SamplingParams(max_tokens=16, ignore_eos=True),
        SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.8, seed=5),
    ]
    found = []
    for draft, options in (
        ("auto", {"budget": 24}),
        ("none", {"budget": 1}),
        ("suffix", {"budget": 9, "chunk": 4, "resident": [1]}),
    ):
        with tiny_engine(folder, draft, int8_cache=True, **options) as engine:
            for params in requests:
                result = engine.generate(PROMPT, params)
                assert result.kv_cache == "int8"
                found.append(result.token_ids)
                longer = [*PROMPT, *result.token_ids[:7], 40, 41]
                found.append(engine.generate(longer, params).token_ids)
    quantize_rows(monkeypatch)
    with tiny_engine(folder, "none", budget=1) as engine:
        expected = []
        for params in requests:
            expected.append(engine.generate(PROMPT, params).token_ids)
            engine._states.first.forget()
            expected.append(engine.generate([*PROMPT, *expected[-1][:7], 40, 41], params).token_ids)
            engine._states.first.forget()
    assert found == expected * 3
