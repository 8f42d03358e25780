"""Attention's contract on bits: a query's result depends on itself and its own path alone.

A world is a text and a tree behind it. Some nodes are asked for again, each with its path laid out as one
chain: alone, at the end of a chunk, over a prefix of any length. Some neighbours' values are huge.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from offspec_kernels.backend import Backend
from offspec_kernels.quantized_rows import QuantizedRows, Rows
from offspec_kernels.tree_attention import AttentionChunk, TreeMask, brgemm_tiles, tree_attention
from offspec_kernels.tree_attention.sizes import NEAR, STEP
from tests.support.kernel_device import device_of, needs_compiled_kernels


@dataclass(frozen=True)
class World:
    """A text of `prefix` tokens and a tree of `rows` behind it; a `deep` tree has one long branch."""

    prefix: int
    rows: int
    heads: tuple[int, int] = (4, 2)
    size: int = 16
    width: int | None = None  # of a value, if not that of a key
    deep: bool = False
    dtype: torch.dtype = torch.float32
    quantized: bool = False  # keys and values in 8 bits
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Laid:
    query: Tensor
    key: Rows
    value: Rows
    sees: Tensor


def _laid(world: World, device: torch.device) -> Laid:
    rng, generator = random.Random(1), torch.Generator().manual_seed(0)
    sees = torch.eye(world.rows, dtype=torch.bool)
    for node in range(1, world.rows):
        straight = world.deep and rng.random() < 0.95
        sees[node] |= sees[node - 1 if straight else rng.randrange(max(0, node - 20), node)]
    count = world.prefix + world.rows
    query = torch.randn(1, world.heads[0], count, world.size, generator=generator)
    key = torch.randn(1, world.heads[1], count, world.size, generator=generator)
    value = torch.randn(1, world.heads[1], count, world.width or world.size, generator=generator)
    key[0, 0, min(5, count - 1)] *= 20
    key[0, 0, world.prefix // 2] *= 100  # a maximum that comes late
    value[0, :, world.prefix + 2 :: 7] *= 1e4
    query, key, value = (of.to(device, world.dtype) for of in (query, key, value))
    if world.quantized:
        return Laid(query, QuantizedRows.of(key), QuantizedRows.of(value), sees)
    return Laid(query, key, value, sees)


def _asked(length: int, most: int) -> Iterator[tuple[int, int]]:
    """Ways to ask for the last of a chain: with how many rows, over a prefix of how many."""
    for rows in sorted({1, 2, min(length, max(most // 10, 1)), min(length, most)}):
        for prefix in sorted({0, length - rows, max(0, length - rows - 33)}):
            yield rows, prefix


def _chain(laid: Laid, path: list[int], rows: int, prefix: int, path_: Backend, **options: Any) -> Tensor:
    """[H, E], of the last of `path`, asked for with the `rows` - 1 before it."""
    length = len(path)
    tree_mask = TreeMask.of(
        torch.zeros(rows, 0, dtype=torch.bool),
        prefix=prefix,
        causal=length - prefix,
        first=length - rows - prefix,
        position=torch.arange(prefix, length, device=laid.query.device),
        device=laid.query.device,
    )
    query, key, value = laid.query[:, :, path], laid.key[:, :, path], laid.value[:, :, path]
    return tree_attention(query[:, :, -rows:], key, value, tree_mask, path=path_, **options)[0, :, -1]


def _check(world: World, backend: Backend, nodes: int, most: int) -> None:
    device = device_of(backend)
    laid, start, options = _laid(world, device), world.prefix, dict(world.options)
    if "sinks" in options:
        options["sinks"] = options["sinks"].to(device)
    position = torch.tensor([start + int(row.sum()) - 1 for row in laid.sees], device=device)
    tree_mask = TreeMask.of(laid.sees, prefix=start, position=position, device=device)
    whole = tree_attention(laid.query[:, :, start:], laid.key, laid.value, tree_mask, path=backend, **options)
    deepest = int(laid.sees.sum(dim=1).argmax())
    for node in {0, deepest, *random.Random(2).sample(range(world.rows), nodes - 2)}:
        path = [*range(start), *(start + laid.sees[node].nonzero()[:, 0]).tolist()]
        for rows, prefix in _asked(len(path), most):
            got = _chain(laid, path, rows, prefix, backend, **options)
            assert torch.equal(got, whole[0, :, node]), (node, rows, prefix)


_SINKS = torch.linspace(-1, 3, 8)
_ALL = {"window": 70, "softcap": 20.0, "sinks": _SINKS}


def _name(value: object) -> str:
    return f"{value.prefix}-{value.rows}-{value.size}" if isinstance(value, World) else str(value)


@pytest.mark.parametrize(
    ("dtype", "world"),
    [
        (torch.float32, World(10, 20, size=64)),
        (torch.bfloat16, World(10, 20, size=64)),
        (torch.float32, World(100, 64, heads=(9, 3), size=64)),
        (torch.bfloat16, World(700, 64, heads=(4, 4), size=80)),
        (torch.float16, World(300, 40, heads=(3, 1), size=40, width=24)),
        (torch.bfloat16, World(2040, 200, heads=(1, 1), deep=True, options={"window": AttentionChunk(1100)})),
        (torch.float32, World(2300, 100, heads=(8, 2), options=_ALL)),
        *(
            pytest.param(dtype, world, marks=pytest.mark.exhaustive)
            for dtype, world in (
                (torch.bfloat16, World(4300, 200, heads=(8, 2), size=64, deep=True)),
                (torch.float16, World(2300, 100, heads=(8, 2), options=_ALL)),
                (torch.bfloat16, World(2500, 150, heads=(8, 2), deep=True, options={"window": 1000})),
                (torch.float32, World(2040, 200, heads=(1, 1), deep=True)),
            )
        ),
    ],
    ids=_name,
)
def test_on_a_cpu(dtype: torch.dtype, world: World) -> None:
    _check(replace(world, dtype=dtype), "eager", nodes=4, most=700)


@pytest.mark.parametrize(
    "world", [World(700, 64, size=48), World(2040, 200, heads=(1, 1), deep=True)], ids=_name
)
def test_on_a_cpu_without_small_products(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brgemm_tiles, "is_supported", lambda: False)
    _check(replace(world, dtype=torch.bfloat16), "eager", nodes=3, most=300)


@pytest.mark.kernels
@pytest.mark.parametrize(
    "world",
    [
        World(10, 12),
        World(270, 5, heads=(2, 1), quantized=True),
        *(
            pytest.param(world, marks=pytest.mark.exhaustive)
            for world in (
                World(275, 5, heads=(3, 1), options={"softcap": 5.0, "sinks": _SINKS[:3]}),
                World(390, 6, heads=(2, 1), dtype=torch.bfloat16, options={"window": 300}),
                World(1130, 6, heads=(2, 1)),
                World(200, NEAR + 2 * STEP, heads=(1, 1), deep=True),
                World(
                    1000, NEAR + 2 * STEP, heads=(1, 1), deep=True, options={"window": AttentionChunk(550)}
                ),
            )
        ),
    ],
    ids=_name,
)
def test_as_kernels(world: World) -> None:
    _check(world, "triton", nodes=2, most=4)


@pytest.mark.gpu
@needs_compiled_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "world",
    [
        World(100, 64, heads=(9, 3), size=64),
        World(700, 64, heads=(32, 8), size=128),
        World(800, 64, heads=(32, 8), size=128, quantized=True),
        World(300, 40, heads=(3, 1), size=40, width=24),
        World(4300, 200, heads=(8, 2), size=64, deep=True),
        World(2300, 100, heads=(8, 2), options=_ALL),
        World(2040, 200, heads=(1, 1), deep=True, options={"window": AttentionChunk(1100)}),
    ],
    ids=_name,
)
def test_on_a_gpu(world: World, dtype: torch.dtype) -> None:
    """In worlds that are too large for the interpreter."""
    _check(replace(world, dtype=dtype), "triton", nodes=4, most=700)
