"""Positions in layers that derive them from the number of rows or the longest position of a call.

Query scale: Llama 4's layers without rotary embedding scale a query by log(⌊(position + 1) / floor⌋ + 1)
times a factor, plus one. They take the position from the length of the cache, which is wrong for a token
tree, where siblings have the same position. For a tree, the layer therefore skips the scale and attention
applies it.

Rotary frequencies: LongRoPE (arXiv 2402.13753) has two sets of factors, one for texts up to the training
length and one for longer texts. transformers chooses by the longest position of each call, so the cache would
mix keys of both kinds as soon as a text, or a deep tree, grows past that length. As in vLLM, the requested
context decides once.
"""

from collections.abc import Callable
from typing import Any

import torch

from offspec.model.patches import wrap

Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, [1, T, D] each


def scale_in_attention(model: Any) -> None:
    """Make attention over a token tree apply the query scale of layers that would count rows.

    Args:
        model: transformers model. A forward without a tree is not changed.
    """
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", None) and not getattr(module, "use_rope", True):
            module.scales_by_position = True
            wrap(module, _unscaled, module)


def position_scale(module: torch.nn.Module, position: torch.Tensor) -> torch.Tensor | None:
    """Return query factors [T] float32 at `position` [T]; None if the layer has none or applies its own."""
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


def select_rope_factors(model: Any, context: int) -> bool:
    """Use the long factors for every position if the context exceeds the original length.

    Otherwise transformers uses the short factors for all positions.

    Args:
        model: transformers model.
        context: Maximum positions of prompt and answer.

    Returns:
        Whether the model was changed.
    """
    changed = False
    for module in model.modules():
        original = original_length(module)
        if original is not None and context > original:
            wrap(module, _long, original)
            changed = True
    return changed


def original_length(module: Any) -> int | None:
    """Return the length up to which a rotary embedding uses short factors; None if it has only one set."""
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
    """Compute cosines and sines with an extra position beyond the original length, which is then removed."""
    beyond = position_ids.new_full((*position_ids.shape[:-1], 1), original)
    cosines, sines = forward(like, torch.cat([position_ids, beyond], dim=-1), *args, **kwargs)
    return cosines[..., :-1, :], sines[..., :-1, :]
