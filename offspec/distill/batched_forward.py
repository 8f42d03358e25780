"""Batched forward pass of a target: one read of its weights generates a token of each sequence.

A token tree is one text with branches. A batch is many independent texts of one length, so the model's own
modules run as transformers runs a batch, over the same weights, which are streamed layer by layer.

Notation: B sequences, T new positions of each, S all positions so far, H heads, KV key heads, D head size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from offspec.model.attention import UNSAID, window_of
from offspec.model.cache import TreeCache
from offspec.model.loaded import LoadedModel
from offspec_kernels.tree_attention import Window
from offspec_kernels.tree_mask import first_visible

NAME = "offspec_batch"


class Batch:
    """States of sequences of one length, extended position by position.

    taps: layers whose inputs are recorded too. The target must be loaded; `running` uses its modules.
    """

    def __init__(self, target: LoadedModel, length: int, taps: Sequence[int] = ()) -> None:
        self._target = target
        self._cache = TreeCache(len(target.skeleton.rows.kept), length)
        self._taps = tuple(taps)
        self._inputs: dict[int, torch.Tensor] = {}
        self.length = 0

    def run(self, tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Append tokens [B, T]; return states after the final norm [B, T, hidden], and the taps."""
        rows, count = tokens.shape
        position = torch.arange(self.length, self.length + count, device=tokens.device).expand(rows, -1)
        with torch.no_grad():
            out = self._target.skeleton.decoder(
                input_ids=tokens, position_ids=position, past_key_values=self._cache, use_cache=True
            )
        self.length += count
        self._cache.length = self.length
        return out.last_hidden_state, [self._inputs[layer] for layer in self._taps]

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all sequences except these."""
        for layer in self._cache.rows:
            if layer.keys is not None and layer.values is not None:
                layer.keys, layer.values = layer.keys[rows], layer.values[rows]

    @contextmanager
    def patched_target(self) -> Iterator[None]:
        """Let the target compute batches instead of trees while the block runs."""
        model = self._target.skeleton.model
        before = model.config._attn_implementation
        hooks = [
            self._target.skeleton.layers[layer].register_forward_pre_hook(self._tap(layer))
            for layer in self._taps
        ]
        from transformers import AttentionInterface

        AttentionInterface.register(NAME, attend_batch)
        model.set_attn_implementation(NAME)
        try:
            yield
        except BaseException:
            self._target.recover()
            raise
        finally:
            model.set_attn_implementation(before)
            for hook in hooks:
                hook.remove()

    def _tap(self, layer: int) -> Any:
        def keep(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            self._inputs[layer] = args[0].clone()  # a layer may write to its input

        return keep


def attend_batch(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | str | None = UNSAID,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from query [B, H, T, D] to key and value [B, KV, S, D]: ([B, T, H, D], None).

    The queries are the last T of S positions. `s_aux` [H] are attention sinks. Sequences have no padding, so
    only the future is masked.
    """
    batch, heads, count, size = query.shape
    groups, length = key.shape[1], key.shape[2]
    scale = size**-0.5 if scaling is None else scaling
    grouped = query.reshape(batch, groups, heads // groups * count, size)
    scores = (grouped @ key.transpose(2, 3)).float().view(batch, heads, count, length) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    window = window_of(module) if isinstance(sliding_window, str) else sliding_window
    hidden = _unseen(count, length, window, scores.device)
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
    if s_aux is None:
        weights = scores.softmax(-1)
    else:
        sinks = s_aux.float().view(1, heads, 1, 1).expand(batch, -1, count, -1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    weights = weights.to(value.dtype).view(batch, groups, heads // groups * count, length)
    out = (weights @ value).view(batch, heads, count, value.shape[3])
    return out.transpose(1, 2).contiguous(), None


def _unseen(count: int, length: int, window: Window | None, device: torch.device) -> torch.Tensor | None:
    """Return [T, S]: positions that are masked; None if none is."""
    if count == 1 and (window is None or first_visible(window, length - 1) <= 0):
        return None
    key, own = torch.arange(length, device=device), torch.arange(length - count, length, device=device)
    hidden = key > own[:, None]
    return hidden | (key < first_visible(window, own)[:, None]) if window is not None else hidden
