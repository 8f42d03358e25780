"""The recurrence along trees: right on every path, and with the bits of a row by itself on its own path."""

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offspec_kernels.backend import Backend
from offspec_kernels.tree_scan import TraversalOrder, traversal_order, tree_scan
from tests.support.kernel_device import device_of
from tests.support.pairwise import all_pairs
from tests.support.poison import poisoned

HEAD, NUMBER, RATES = "a head", "a number of a key", "a number of a state"  # which has a decay

DTYPES = [torch.float32, torch.bfloat16]
Sizes = tuple[tuple[int, int], tuple[int, int]]  # (H, G), (D, E)


@dataclass(frozen=True)
class World:
    """Rows by their parents, and what they add to a state [H, D, E]; with `delta` there is a beta."""

    parents: tuple[int, ...]
    decay: str = HEAD
    delta: bool = True
    heads: tuple[int, int] = (4, 2)  # H, G
    sizes: tuple[int, int] = (33, 70)  # D, E
    dtype: torch.dtype = torch.float32


def bushy(rows: int, seed: int = 0) -> tuple[int, ...]:
    """A forest: its first rows and some others hang from the state before all rows."""
    rng = random.Random(seed)
    return tuple(rng.randrange(max(-1, row - 6), row) for row in range(rows))


def chain(rows: int) -> tuple[int, ...]:
    return tuple(range(-1, rows - 1))


class Inputs:
    """Random rows; with `cut`, rows by number. Among the decays some leave nothing of a state."""

    def __init__(self, world: World, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        rows, (heads, groups), (size, width) = len(world.parents), world.heads, world.sizes
        shape = {HEAD: (), NUMBER: (size,), RATES: (width,)}[world.decay]
        decay = drawn(rows, heads, *shape).abs()
        decay[3::7] = 200.0
        self.state = drawn(heads, size, width)
        self.rates = -drawn(heads, size, width).abs() if world.decay == RATES else None
        kept = {"key": drawn(rows, groups, size) / math.sqrt(size), "value": drawn(rows, heads, width)}
        kept |= {"query": drawn(rows, groups, size), "decay": decay if world.decay == RATES else -decay}
        if world.delta:
            kept["beta"] = drawn(rows, heads).sigmoid()
        self.rows = {name: of.to(world.dtype) for name, of in kept.items()}

    def scan(self, order: TraversalOrder, path: Backend, **options: Any) -> Tensor:
        """`tree_scan` of all rows; in `options` what differs."""
        given = {**self.rows, "state": self.state, "rates": self.rates, **options}
        device = device_of(path)
        there = {name: of if of is None or of.is_meta else of.to(device) for name, of in given.items()}
        if "final" in options and options["final"] is given["state"]:
            there["final"] = there["state"]  # it replaces the first
        with poisoned():
            out = tree_scan(order=order, path=path, **there)
        if options.get("final") is not None:
            options["final"].copy_(there["final"])
        return torch.empty(0) if out is None else out.cpu()

    def cut(self, rows: list[int], state: Tensor) -> "Inputs":
        """Of some rows, from another state."""
        made: Inputs = object.__new__(Inputs)
        made.rows = {name: of[rows] for name, of in self.rows.items()}
        made.state, made.rates = state, self.rates
        return made


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


def check_near(world: World, path: Backend) -> None:
    """Results and the last state, with all that can be left out, beside the reference's."""
    inputs, order = Inputs(world), traversal_order(world.parents)
    final, wanted = (torch.full_like(inputs.state, math.nan) for _ in range(2))
    out = inputs.scan(order, path, final=final)
    close(out, inputs.scan(order, "reference", final=wanted))
    close(final, wanted)
    assert torch.equal(inputs.scan(order, path), out)
    alone = torch.full_like(final, math.nan)
    inputs.scan(order, path, query=None, final=alone)
    assert torch.equal(alone, final)


SHAPES = [
    ((4, 2), (33, 70)),
    ((1, 1), (16, 200)),
    ((3, 3), (1, 1)),
    ((6, 1), (130, 3)),
    ((2, 2), (64, 128)),
]


KINDS = [(decay, delta) for decay in (HEAD, NUMBER, RATES) for delta in (True, False)]


@pytest.mark.parametrize(("decay", "delta"), KINDS)
@pytest.mark.parametrize(("heads", "sizes"), SHAPES)
def test_on_a_cpu(heads: tuple[int, int], sizes: tuple[int, int], decay: str, delta: bool) -> None:
    for parents in (bushy(40), chain(12), (-1, -1, -1, 0, 0, 2)):
        check_near(World(parents, decay, delta, heads, sizes), "eager")


@pytest.mark.kernels
@pytest.mark.parametrize(("decay", "delta"), KINDS)
def test_as_kernels(decay: str, delta: bool) -> None:
    parents = (-1, 0, 1, 1, 0, -1, 5)  # two that wait for several children, one behind the other
    check_near(World(parents, decay, delta, (2, 1), (5, 9)), "triton")


@pytest.mark.kernels
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "shape"), all_pairs([KINDS[0], KINDS[3], KINDS[4]], [SHAPES[0], SHAPES[2], ((1, 1), (128, 16))])
)
def test_more_kernels(kind: tuple[str, bool], shape: Sizes) -> None:
    check_near(World(bushy(8), *kind, *shape), "triton")


PATHS: list[Backend] = ["reference", "eager", "triton"]


@pytest.mark.parametrize(("path", "decay"), zip(PATHS, (HEAD, NUMBER, RATES), strict=True))
def test_some_of_the_rows(path: Backend, decay: str) -> None:
    """Others may hold anything, and get nothing."""
    world = World(bushy(10), decay, heads=(2, 1), sizes=(6, 5))
    inputs, wanted = Inputs(world), Inputs(world).scan(traversal_order(world.parents), "reference")
    needed = torch.tensor(_path(world.parents, 9) + _path(world.parents, 7)).unique().numpy()
    place = {int(row): index for index, row in enumerate(needed)} | {-1: -1}
    order = traversal_order([place[world.parents[row]] for row in needed]).remap_rows(needed)
    others = [row for row in range(10) if row not in place]
    assert others, "some are left out"
    for of in inputs.rows.values():
        of[others] = math.nan
    out = inputs.scan(order, path)
    close(out[needed], wanted[needed])
    assert out[others].isnan().all()


@pytest.mark.parametrize("path", PATHS)
def test_the_last_state_may_replace_the_first(path: Backend) -> None:
    """And without rows it is the first."""
    world = World((-1, 0, 0, -1, -1, 4), heads=(2, 1), sizes=(6, 5))
    inputs, order = Inputs(world), traversal_order(world.parents)
    final = torch.empty_like(inputs.state)
    out = inputs.scan(order, path, final=final)
    state = inputs.state.clone()
    assert torch.equal(inputs.scan(order, path, state=state, final=state), out)
    assert torch.equal(state, final)
    inputs, final = Inputs(World(())), torch.full((4, 33, 70), math.nan)
    assert inputs.scan(traversal_order([]), path, final=final).shape == (0, 4, 70)
    assert torch.equal(final, inputs.state)


def _path(parents: tuple[int, ...], row: int) -> list[int]:
    path = [row]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def check_bits(world: World, path: Backend, asked: list[int]) -> None:
    """Rows of a tree again: by themselves on their path, behind a state that a part of it has left, and
    beside rows that are no numbers.
    """
    inputs = Inputs(world)
    whole = inputs.scan(traversal_order(world.parents), path)
    for row in asked:
        rows = _path(world.parents, row)
        alone = inputs.cut(rows, inputs.state).scan(traversal_order(chain(len(rows))), path)
        assert torch.equal(alone, whole[rows])
        half = len(rows) // 2
        state = inputs.state.clone()  # as a commit leaves it: nobody asks
        first = inputs.cut(rows[:half], inputs.state)
        first.scan(traversal_order(chain(half)), path, query=None, state=state, final=state)
        rest = inputs.cut(rows[half:], state).scan(traversal_order(chain(len(rows) - half)), path)
        assert torch.equal(rest, whole[rows[half:]])
    for of in inputs.rows.values():  # of the last one's neighbours
        of[[other for other in range(len(world.parents)) if other not in rows]] = math.nan
    assert torch.equal(inputs.scan(traversal_order(world.parents), path)[rows], whole[rows])


@pytest.mark.parametrize(("kind", "shape", "dtype"), all_pairs(KINDS, SHAPES, DTYPES))
def test_the_bits_of_a_row_on_a_cpu(kind: tuple[str, bool], shape: Sizes, dtype: torch.dtype) -> None:
    world = World(bushy(60), *kind, *shape, dtype)
    check_bits(world, "eager", list(range(0, 60, 7)))
    check_bits(replace(world, parents=chain(30)), "eager", [29])


@pytest.mark.kernels
@pytest.mark.parametrize(("kind", "dtype"), zip(KINDS, (*DTYPES, *DTYPES[::-1], *DTYPES), strict=True))
def test_the_bits_of_a_row_as_kernels(kind: tuple[str, bool], dtype: torch.dtype) -> None:
    check_bits(World((-1, 0, 1, 0, 3, 3, -1), *kind, (2, 1), (5, 9), dtype), "triton", [2, 5, 6])


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**6), max_size=300))
def test_orders(numbers: list[int]) -> None:
    parents = [number % (row + 1) - 1 for row, number in enumerate(numbers)]
    order = traversal_order(parents)
    assert sorted(order.row.tolist()) == list(range(len(parents)))
    assert order.places <= math.log2(max(len(parents), 1)) + 2
    behind = {0: -1}  # of which row the state in a place is
    for row, source, target in zip(order.row, order.source, order.target, strict=True):
        assert behind[source] == parents[row]
        assert 0 <= target < order.places
        behind[target] = int(row)


def test_places_of_a_full_tree() -> None:
    rows = 1000
    assert traversal_order([(row + 1) // 2 - 1 for row in range(rows)]).places <= math.log2(rows) + 2
    assert traversal_order(chain(rows)).places == 1
    assert traversal_order([-1] * rows).places == 2
