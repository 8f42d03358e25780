"""A token tree as a dense mask, for layers that compute attention in their own way or select keys by a mask.

Such a layer gets its mask and biases as its family makes them for plain text: one value for each key, taken
to stand at the position that is its row's number. Keys of a tree stand elsewhere, so values are looked up by
position. That a bias may be shifted by a constant is ALiBi's own assumption (arXiv 2108.12409), but for
rounding: Falcon's is in bfloat16.

Letters: T rows that go through a layer together, S keys up to theirs, P positions of what a family made.
"""

import inspect
from typing import Any

import torch

from offspec.model.attention import TreeContext

# Biases of keys, and whether the last of them is the last key's: they are of as many keys as there may be.
_BIASES = {"alibi": False, "position_bias": True}


class DenseMasks:
    """The arguments of a layer with a tree's mask in the place of its family's.

    Args:
        layer: Whose `forward` names its arguments.
    """

    def __init__(self, layer: Any) -> None:
        parameters = list(inspect.signature(layer.forward).parameters)
        self._positional = parameters[1:]  # behind the hidden states

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name."""
        return dict(zip(self._positional, args, strict=False)) | kwargs

    @staticmethod
    def over_tree(given: dict[str, Any], tree: TreeContext, rows: int, end: int) -> dict[str, Any]:
        """What is to replace some of the arguments `given`, for the `rows` that end at `end`."""
        seen, position = _seen(tree, rows, end), _key_positions(tree, end)
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


def _key_positions(tree: TreeContext, end: int) -> torch.Tensor:
    """[S] int64."""
    return torch.cat([torch.arange(tree.prefix, device=tree.position.device), tree.position[:end]])


def _mask_over(made: torch.Tensor | None, seen: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """[1, H or 1, T, S]: `seen` in the kind of mask that a family made, [1, H or 1, rows, P], or as it is.

    The last row of what it made sees all positions; what that says of each is kept.
    """
    if made is None:
        return seen[None, None]
    shown = made[..., -1:, :][..., position]
    hidden = ~shown if made.dtype == torch.bool else made.new_tensor(torch.finfo(made.dtype).min)
    return torch.where(seen, shown, hidden)
