"""Queries scaled by their position, where a family counts positions by rows of the cache.

Llama 4's layers without rotary embedding scale a query by log(⌊(position + 1) / floor⌋ + 1) times a factor,
plus one, and take the position from the length of the cache, which is wrong of a token tree: siblings are of
one position. There the layer is told to leave it out, and attention does it.
"""

from collections.abc import Callable
from typing import Any

import torch

from offspec.model.patches import wrap


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
