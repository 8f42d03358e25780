"""Positions in layers whose family counts them by the rows or the longest position of a call.

A query's scale: Llama 4's layers without rotary embedding scale a query by log(⌊(position + 1) / floor⌋ + 1)
times a factor, plus one, and take the position from the length of the cache, which is wrong of a token tree:
siblings are of one position. There the layer is told to leave it out, and attention does it.

Rotary frequencies: LongRoPE (arXiv 2402.13753) has two sets of factors, one for texts up to the length that a
model was trained on, one for longer ones. transformers chooses by the longest position of each call, so that
keys in the cache would be of two kinds as soon as a text, or a deep tree, grows past that length. As in vLLM
the context that is asked for decides, once.
"""

from collections.abc import Callable
from typing import Any

import torch

from offspec.model.patches import wrap

Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, [1, T, D] each


def scale_in_attention(model: Any) -> None:
    """Have layers that would count rows leave the scale of their queries to attention over a token tree.

    Args:
        model: Of transformers. In a forward without a tree everything stays as it is.
    """
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", None) and not getattr(module, "use_rope", True):
            module.scales_by_position = True
            wrap(module, _unscaled, module)


def position_scale(module: torch.nn.Module, position: torch.Tensor) -> torch.Tensor | None:
    """[T] float32, factors of queries at `position` [T]; None where a layer has none, or its own."""
    layer: Any = module
    if not getattr(layer, "scales_by_position", False):
        return None
    steps = torch.floor((position.float() + 1.0) / layer.floor_scale)
    scale: torch.Tensor = torch.log1p(steps) * layer.attn_scale + 1.0
    return scale


def _unscaled(
    forward: Callable[..., Any], module: Any, /, *args: Any, tree: Any = None, **kwargs: Any
) -> Any:
    if tree is None:
        return forward(*args, **kwargs)
    before, module.attn_temperature_tuning = module.attn_temperature_tuning, False
    try:
        return forward(*args, tree=tree, **kwargs)
    finally:
        module.attn_temperature_tuning = before


def fix_frequencies(model: Any, context: int) -> bool:
    """Have every position rotated by the long factors where the context is beyond the original length.

    Within that length no position is, and transformers chooses the short ones by itself. Returns whether they
    were changed.

    Args:
        model: Of transformers.
        context: Most positions of prompt and answer.
    """
    changed = False
    for module in model.modules():
        original = original_length(module)
        if original is not None and context > original:
            wrap(module, _long, original)
            changed = True
    return changed


def original_length(module: Any) -> int | None:
    """The length up to which a rotary embedding takes the short factors; None where it has one set."""
    kinds = getattr(module, "rope_type", None)
    if "longrope" not in (kinds.values() if isinstance(kinds, dict) else [kinds]):
        return None
    entries = module.config.rope_parameters
    entries = [entries, *(entry for entry in entries.values() if isinstance(entry, dict))]
    lengths = [entry.get("original_max_position_embeddings") for entry in entries]
    lengths.append(getattr(module.config, "original_max_position_embeddings", None))
    return max((length for length in lengths if length), default=None)


def _long(
    forward: Callable[..., Rotation],
    original: int,
    like: torch.Tensor,
    position_ids: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Rotation:
    """Cosines and sines of a rotary embedding that is given one more position, beyond the original length."""
    beyond = position_ids.new_full((*position_ids.shape[:-1], 1), original)
    cosines, sines = forward(like, torch.cat([position_ids, beyond], dim=-1), *args, **kwargs)
    return cosines[..., :-1, :], sines[..., :-1, :]
