"""Attention over a committed prefix and a token tree, registered with transformers as "offspec_tree".

Letters: L prefix rows, T new rows of this pass, S = L + new rows so far, H heads, KV key heads, G = H / KV,
D head size. The model is called with `tree=TreeContext(...)`, which reaches this function as a keyword.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from offspec.errors import UnsupportedModelError

NAME = "offspec_tree"
_UNSAID = "not said"
ROWS = 256  # that attend together: more waste work on keys that the first of them may not see
KEPT_MASKS = 32 << 20  # bytes of masks kept from layer to layer; a long prompt's are made anew


@dataclass(slots=True)
class TreeContext:
    """Who may see whom in one pass.

    prefix: L committed rows, seen by every new row. position [M] int64: the absolute position of every
    row behind the prefix, those of this pass last. Of these M rows the first `causal` are a plain chain
    (each sees those before it); the others see all of the chain and, of the tree, what `ancestors`
    [M - causal, M - causal] bool says.
    """

    prefix: int
    position: torch.Tensor
    causal: int
    ancestors: torch.Tensor
    _masks: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)

    @classmethod
    def chain(cls, rows: int, device: torch.device) -> "TreeContext":
        """Plain causal text from position 0 on, nothing before it."""
        empty = torch.zeros(0, 0, dtype=torch.bool, device=device)
        return cls(prefix=0, position=torch.arange(rows, device=device), causal=rows, ancestors=empty)

    def mask(self, start: int, end: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[end - start, L + end]: 0 where row start + i may look, -inf elsewhere; kept for the next layer."""
        key = (start, end, window or 0)
        if key not in self._masks:
            visible = self._visible(start, end, window)
            bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
            if sum(mask.nbytes for mask in self._masks.values()) > KEPT_MASKS:
                self._masks.clear()
            self._masks[key] = bias.masked_fill_(~visible, float("-inf"))
        return self._masks[key]

    def _visible(self, start: int, end: int, window: int | None) -> torch.Tensor:
        device = self.position.device
        rows = torch.arange(start, end, device=device)
        columns = torch.arange(end, device=device)
        visible = columns[None, :] <= rows[:, None]  # right for the chain, and parents precede children
        first = max(start, self.causal)
        if first < end:
            tree = self.ancestors[first - self.causal : end - self.causal, : end - self.causal]
            visible[first - start :, self.causal :] = tree
        visible = torch.cat([visible.new_ones(end - start, self.prefix), visible], dim=1)
        if window:
            keys = torch.cat([torch.arange(self.prefix, device=device), self.position[:end]])
            visible &= self.position[start:end, None] - keys[None, :] < window
        return visible


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | str | None = _UNSAID,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    tree: TreeContext | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, T, D], key and value [1, KV, S, D] to ([1, T, H, D], None).

    Handles grouped queries (folded into the rows, so keys are never repeated), sliding windows, soft caps
    and attention sinks (`s_aux` [H]). Raises UnsupportedModelError where the family loses the keyword.
    """
    family = getattr(getattr(module, "config", None), "model_type", type(module).__name__)
    if attention_mask is not None:
        raise UnsupportedModelError(
            f"{family} makes attention masks of its own, which a token tree would break"
        )
    if tree is None:
        raise UnsupportedModelError(
            f"{family} does not hand its keywords down to its attention, so a token tree cannot be verified "
            "with it"
        )
    _, heads, rows, size = query.shape
    end = key.shape[2] - tree.prefix
    window = _window(module) if isinstance(sliding_window, str) else sliding_window
    scale = size**-0.5 if scaling is None else scaling
    out = query.new_empty(1, rows, heads, value.shape[-1])
    for part in pieces(0, rows, ROWS):
        start, stop = part.start, part.stop
        # No row sees a later one, so what lies behind the last row of a block is not even looked at.
        seen = tree.prefix + end - rows + stop
        if rows == 1 and not window and end == 1:
            bias = None  # a lone root sees everything
        else:
            bias = tree.mask(end - rows + start, end - rows + stop, window, query.dtype)
        block = _attend(
            query[:, :, start:stop], key[:, :, :seen], value[:, :, :seen], bias, scale, softcap, s_aux
        )
        out[:, start:stop] = block.transpose(1, 2)
    return out, None


def pieces(start: int, end: int, most: int) -> list[slice]:
    """Pieces of at most `most` rows, as even as can be: a lone one at the end would round otherwise."""
    rows = end - start
    count = -(-rows // most)
    return [slice(start + rows * i // count, start + rows * (i + 1) // count) for i in range(count)]


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """query [1, H, T, D] over key and value [1, KV, S, D] to [1, H, T, D]; bias [T, S] or None."""
    _, heads, rows, size = query.shape
    groups = heads // key.shape[1]
    folded = query.reshape(1, key.shape[1], groups * rows, size)
    if bias is not None and groups > 1:
        bias = bias.expand(groups, -1, -1).reshape(groups * rows, -1)
    if softcap or sinks is not None:
        out = _capped(folded, key, value, bias, scale, softcap, sinks, groups)
    else:
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=bias, scale=scale)
    return out.reshape(1, heads, rows, value.shape[-1])


def _window(module: torch.nn.Module) -> int | None:
    """The window of a layer that leaves it to its mask: what the configuration says."""
    config: Any = getattr(module, "config", None)
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds and index is not None and kinds[index] != "sliding_attention":
        return None
    if getattr(config, "use_sliding_window", None) is False:
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window


def _capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    groups: int,
) -> torch.Tensor:
    """Attention written out, for what torch's fused one cannot do: soft caps (Gemma 2), sinks (gpt-oss)."""
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    if sinks is None:
        return torch.softmax(scores, dim=-1).to(value.dtype) @ value
    rows = query.shape[2] // groups
    sink = (
        sinks.float()
        .reshape(1, key.shape[1], groups, 1)
        .expand(-1, -1, -1, rows)
        .reshape(*scores.shape[:3], 1)
    )
    weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
    return weights.to(value.dtype) @ value


def register() -> str:
    """Make the attention known to transformers (again and again is harmless); returns its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, tree_attention)
    return NAME
