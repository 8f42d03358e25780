"""Token tree as a dense mask, for layers with their own attention code or that select keys by a mask.

The model family makes masks and biases for plain text: one value per key, assuming that a key's position is
its row number. Keys of a tree have other positions, so values are looked up by position. Shifting a bias by a
constant changes nothing in ALiBi (arXiv 2108.12409), except for rounding: Falcon's biases are in bfloat16.

Letters: T rows that go through a layer together, S keys up to these rows, P positions of the family's mask.
"""

from typing import Any

import torch

from offspec.model.attention import TreeContext

# Biases by name, and whether the last value is that of the last key: there are values for all possible keys.
_BIASES = {"alibi": False, "position_bias": True}


def dense_tree_arguments(given: dict[str, Any], tree: TreeContext, rows: int) -> dict[str, Any]:
    """Return replacements by name for arguments `given` to a layer, for the `rows` of the current call."""
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
    """Return [T, S] bool, the keys that each row sees; padding rows see what the row before them sees."""
    kept = rows - tree.padding
    tree_mask = tree.tree_mask(end - kept, end)
    name = ("seen", end, kept)
    if name not in tree_mask.kept:
        tree_mask.kept[name] = tree_mask.visible(0, (0, kept), (0, tree.prefix + end))
    seen: torch.Tensor = tree_mask.kept[name]
    return torch.cat([seen, seen[-1:].expand(tree.padding, -1)]) if tree.padding else seen


def _mask_over(made: torch.Tensor | None, seen: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Return `seen` as [1, H or 1, T, S], in the form of the family's mask `made` [1, H or 1, rows, P].

    The last row of `made` sees all positions; its value at each is used for visible keys.
    """
    if made is None:
        return seen[None, None]
    shown = made[..., -1:, :][..., position]
    hidden = ~shown if made.dtype == torch.bool else made.new_tensor(torch.finfo(made.dtype).min)
    return torch.where(seen, shown, hidden)
