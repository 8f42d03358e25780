"""A token tree as a dense mask, for layers that compute attention in their own way or select keys by a mask.

Such a layer gets its mask and biases as its family makes them for plain text: one value for each key, taken
to stand at the position that is its row's number. Keys of a tree stand elsewhere, so values are looked up by
position. That a bias may be shifted by a constant is ALiBi's own assumption (arXiv 2108.12409), but for
rounding: Falcon's is in bfloat16.

Letters: T rows that go through a layer together, S keys up to theirs, P positions of what a family made.
"""

from typing import Any

import torch

from offspec.model.attention import TreeContext

# Biases of keys, and whether the last of them is the last key's: they are of as many keys as there may be.
_BIASES = {"alibi": False, "position_bias": True}


def over_tree(given: dict[str, Any], tree: TreeContext, rows: int) -> dict[str, Any]:
    """What is to replace some of the arguments `given` of a layer, by name, for the `rows` that run now."""
    assert tree.end is not None
    position = torch.cat([torch.arange(tree.prefix, device=tree.position.device), tree.position[: tree.end]])
    seen = _seen(tree, rows, tree.end)
    found = {"attention_mask": _mask_over(given.get("attention_mask"), seen, position)}
    for name, ends_with_keys in _BIASES.items():
        if isinstance(bias := given.get(name), torch.Tensor):
            first = bias.shape[-1] - 1 - int(position.max()) if ends_with_keys else 0
            found[name] = bias[..., position + first]
    return found


def _seen(tree: TreeContext, rows: int, end: int) -> torch.Tensor:
    """[T, S] bool; rows of padding see what the row before them sees."""
    kept = rows - tree.padding
    tree_mask = tree.tree_mask(end - kept, end)
    name = ("seen", end, kept)
    if name not in tree_mask.kept:
        tree_mask.kept[name] = tree_mask.visible(0, (0, kept), (0, tree.prefix + end))
    seen: torch.Tensor = tree_mask.kept[name]
    return torch.cat([seen, seen[-1:].expand(tree.padding, -1)]) if tree.padding else seen


def _mask_over(made: torch.Tensor | None, seen: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """[1, H or 1, T, S]: `seen` in the kind of mask that a family made, [1, H or 1, rows, P], or as it is.

    The last row of what it made sees all positions; what that says of each is kept.
    """
    if made is None:
        return seen[None, None]
    shown = made[..., -1:, :][..., position]
    hidden = ~shown if made.dtype == torch.bool else made.new_tensor(torch.finfo(made.dtype).min)
    return torch.where(seen, shown, hidden)
