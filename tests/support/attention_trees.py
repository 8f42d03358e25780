"""Trees, caches and masks of every shape, to test tree attention."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offspec_kernels.tree_attention import TreeMask


@dataclass(frozen=True)
class Shape:
    """One tree: L prefix rows, C chain rows, then R tree rows. The last N of the C + R rows are queries."""

    prefix: int
    causal: int
    tree: int
    queries: int


def random_tree(rows: int, rng: random.Random) -> tuple[Tensor, list[int]]:
    """Return the ancestors [R, R] of a random tree, and the depth of each node."""
    sees, depth = torch.eye(rows, dtype=torch.bool), [0] * rows
    for node in range(1, rows):
        parent = rng.randrange(max(0, node - 6), node)
        sees[node] |= sees[parent]
        depth[node] = depth[parent] + 1
    return sees, depth


def mask_of(shape: Shape, rng: random.Random, device: torch.device) -> TreeMask:
    sees, depth = random_tree(shape.tree, rng)
    rows = torch.cat([torch.zeros(shape.causal, shape.tree, dtype=torch.bool), sees])
    asked = rows[len(rows) - shape.queries :]
    start = shape.prefix + shape.causal
    position = torch.tensor([*range(shape.prefix, start), *(start + d for d in depth)])
    return TreeMask.of(
        asked.to(device), prefix=shape.prefix, causal=shape.causal, position=position.to(device)
    )


@dataclass(frozen=True)
class Case:
    query: Tensor
    key: Tensor
    value: Tensor
    tree_mask: TreeMask


def make_case(
    shapes: list[Shape],
    *,
    heads: tuple[int, int] = (4, 2),
    sizes: tuple[int, int] = (32, 32),
    dtype: torch.dtype = torch.float32,
    loud: float = 1.0,
    seed: int = 0,
    device: str = "cpu",
) -> Case:
    """Random tensors for these trees. Positions that no query sees are NaN, so that reading one shows."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    place = torch.device(device)
    tree_mask = batch([mask_of(shape, rng, place) for shape in shapes])
    keys = max(shape.prefix + shape.causal + shape.tree for shape in shapes) + 5
    query = torch.randn(len(shapes), heads[0], tree_mask.words.shape[1], sizes[0], generator=generator)
    key = torch.randn(len(shapes), heads[1], keys, sizes[0], generator=generator) * loud
    value = torch.randn(len(shapes), heads[1], keys, sizes[1], generator=generator)
    for index, shape in enumerate(shapes):
        used = shape.prefix + shape.causal + shape.tree
        key[index, :, used:] = value[index, :, used:] = torch.nan
        query[index, :, shape.queries :] = torch.nan
    return Case(query.to(place, dtype), key.to(place, dtype), value.to(place, dtype), tree_mask)


def batch(tree_masks: Sequence[TreeMask]) -> TreeMask:
    """Combine trees in one batch; words and positions are padded with zeros."""
    words = _padded([row for mask in tree_masks for row in mask.words.unbind()])
    places = [row for mask in tree_masks if mask.position is not None for row in mask.position.unbind()]
    columns = ("prefix", "first", "count", "causal")
    prefix, first, count, causal = (
        torch.cat([getattr(mask, name) for mask in tree_masks]) for name in columns
    )
    return TreeMask(
        prefix,
        first,
        count,
        causal,
        words,
        position=_padded(places) if len(places) == len(words) else None,
        known=[reach for mask in tree_masks for reach in mask.extents()],
    )


def _padded(parts: Sequence[Tensor]) -> Tensor:
    """Stack tensors of equal rank in one tensor with the largest of each size."""
    sizes = [max(part.shape[axis] for part in parts) for axis in range(parts[0].dim())]
    whole = parts[0].new_zeros(len(parts), *sizes)
    for part, room in zip(parts, whole.unbind(), strict=True):
        room[tuple(slice(size) for size in part.shape)] = part
    return whole
