"""Attention over a committed prefix and a token tree, registered with transformers as "offspec_tree".

Letters: L prefix rows, T new rows of this pass, S = L + new rows so far, H heads, KV key heads, D head size.
The model is called with `tree=TreeContext(...)`, which transformers passes on to `attend_tree` as a keyword.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from offspec.core.errors import UnsupportedModelError
from offspec.model.kv_tensors import parts_in, stored_rows
from offspec.model.positions import position_scale
from offspec.model.torch_functions import bypass_function_modes
from offspec_kernels.transfer import upload
from offspec_kernels.tree_attention import AttentionChunk, Window, tree_attention
from offspec_kernels.tree_mask import TreeExtent, TreeMask, pack_rows

NAME = "offspec_tree"
UNSAID = "not said"


@dataclass(slots=True)
class TreeContext:
    """Positions of one pass's rows, and which rows attend to which.

    Args:
        prefix: L committed rows, seen by every new row.
        position: [M] int64, absolute position of every row after the prefix, the rows of this pass last.
        causal: Number of leading rows of the M that form a plain chain, in which each sees those before it.
            All other rows see the whole chain and part of the tree.
        ancestors: [M - causal, M - causal] bool, the tree rows that each tree row sees. Best kept on the CPU:
            rows are packed there, and only those of the pass go to a device.
        exact: Whether a row's bits must depend on its own path alone, as in a target.
        padding: Copies of the last row that follow the rows of a layer call. They have no keys and attend to
            nothing.
        end: Number of the M rows up to the last one of the current layer call; None if the keys end with it.
        masked: Whether layers also get a dense mask, for uses other than attention.
        kept: Derived values that layers share with later layers.
        tokens: [T] token ids of this pass on the CPU, if known there.
    """

    prefix: int
    position: torch.Tensor
    causal: int
    ancestors: torch.Tensor
    exact: bool = True
    padding: int = 0
    end: int | None = None
    masked: bool = False
    _masks: dict[tuple[int, int], TreeMask] = field(default_factory=dict)
    kept: dict[object, Any] = field(default_factory=dict)
    tokens: torch.Tensor | None = None
    _elsewhere: dict[torch.device, "TreeContext"] = field(default_factory=dict)

    @classmethod
    def chain(cls, rows: int, device: torch.device) -> "TreeContext":
        """Return the context of plain causal text that starts at position 0, with no prefix."""
        empty = torch.zeros(0, 0, dtype=torch.bool)
        return cls(prefix=0, position=torch.arange(rows, device=device), causal=rows, ancestors=empty)

    @classmethod
    def of_step(
        cls,
        tokens: Sequence[int],
        position: Sequence[int],
        sees: NDArray[np.bool_],
        *,
        prefix: int,
        causal: int,
        device: torch.device,
        exact: bool = True,
    ) -> tuple[torch.Tensor, "TreeContext"]:
        """Return tokens [T] on the device and the context of their pass, uploaded in one asynchronous copy.

        Args:
            tokens: Token ids of the last T of the M rows after the prefix.
            position: [M] absolute positions.
            sees: [M - causal, M - causal], `ancestors` of the context. On a CPU its memory is shared.
            prefix: `prefix` of the context.
            causal: `causal` of the context.
            device: Device of the pass.
            exact: `exact` of the context.
        """
        extent = TreeExtent(prefix, len(position) - len(tokens), len(tokens), causal)
        packed = pack_rows(_seen(sees, extent))
        ids = np.array(tokens, np.int64)
        there, places, words, numbers = upload([ids, position, packed, extent.numbers], device)
        context = cls(prefix, places, causal, torch.from_numpy(sees), exact, tokens=torch.from_numpy(ids))
        context._masks[extent.first, len(position)] = TreeMask.uploaded(
            extent, packed, words, numbers, places, context.kept
        )
        return there, context

    def on(self, device: torch.device) -> "TreeContext":
        """Return this context for layers on `device`: itself if it is already there."""
        if self.position.device == device:
            return self
        if device not in self._elsewhere:
            there, masked = self.position.to(device), self.masked
            self._elsewhere[device] = TreeContext(
                self.prefix, there, self.causal, self.ancestors, self.exact, masked=masked, tokens=self.tokens
            )
        return self._elsewhere[device]

    def pieces(self, padded: int) -> "list[tuple[TreeContext, slice]]":
        """Return this context and its rows, those before the padding, of `padded` rows in a layer call."""
        return [(self, slice(0, padded - self.padding))]

    def tree_mask(self, start: int, end: int) -> TreeMask:
        """Return the mask of rows `start` to `end` after the prefix, cached for later layers."""
        if (start, end) not in self._masks:
            extent = TreeExtent(self.prefix, start, end - start, self.causal)
            self._masks[start, end] = TreeMask.of(
                torch.from_numpy(_seen(self.ancestors.cpu().numpy(), extent)),
                prefix=self.prefix,
                causal=self.causal,
                first=start,
                position=self.position,
                kept=self.kept,
                device=self.position.device,
            )
        return self._masks[start, end]


@dataclass(frozen=True, slots=True)
class MergedContext:
    """Contexts of several sequences whose rows go through a layer together.

    Args:
        contexts: Context of each sequence, with `end` set to the end of the rows of the layer call.
        places: Rows of each sequence.
        padding: Padding rows after those of all sequences, as in a `TreeContext`.
        masked: As in a `TreeContext`; always False, because masked layers take one sequence at a time.
    """

    contexts: tuple[TreeContext, ...]
    places: tuple[slice, ...]
    padding: int
    masked: bool = False

    def pieces(self, padded: int) -> list[tuple[TreeContext, slice]]:
        """Return each sequence's context and its rows in a layer call."""
        return [*zip(self.contexts, self.places, strict=True)]


def _seen(sees: NDArray[np.bool_], of: TreeExtent) -> NDArray[np.bool_]:
    """Return [count, R] bool: the tree rows, up to the last row of the extent, that each of its rows sees."""
    columns = max(of.first + of.count - of.causal, 0)
    seen = np.zeros((of.count, columns), np.bool_)
    chain = min(max(of.causal - of.first, 0), of.count)  # chain rows, which see no tree rows
    seen[chain:] = sees[max(of.first - of.causal, 0) : columns, :columns]
    return seen


_RUNNING: ContextVar[TreeContext | MergedContext | None] = ContextVar("running", default=None)


@contextmanager
def pass_context(context: TreeContext | MergedContext) -> Iterator[None]:
    """Set the context of the pass that layers of this thread run in, for the duration of the block."""
    token = _RUNNING.set(context)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def current_context() -> TreeContext | MergedContext | None:
    """Return the context of the pass running in this thread, or None."""
    return _RUNNING.get()


@bypass_function_modes
def attend_tree(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | str | None = UNSAID,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    tree: TreeContext | MergedContext | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from query [1, H, T, D] to key and value [1, KV, S, D]; return ([1, T, H, D], None).

    Rows of several sequences attend to their own sequence's keys, with the same result as in a pass of one
    sequence.

    `s_aux` [H] are attention sinks, `indices` [1, T, K] the keys selected by an index.
    Raises UnsupportedModelError if the model does not pass the `tree` keyword on.
    """
    if attention_mask is not None and not (tree is not None and tree.masked):
        raise UnsupportedModelError("it makes attention masks of its own, which a token tree would break")
    if tree is None:
        raise UnsupportedModelError("it does not hand its keywords down to its attention")
    _, heads, padded, _ = query.shape
    out = query.new_empty(1, padded, heads, value.shape[3])
    for (own, place), keys, values in zip(tree.pieces(padded), parts_in(key), parts_in(value), strict=True):
        end, rows = own.end, place.stop - place.start
        if end is None:
            end = keys.shape[2] - own.prefix
        seen = slice(0, own.prefix + end)
        asked = query[:, :, place]
        if (scale := position_scale(module, own.position[end - rows : end])) is not None:
            asked = (asked * scale[:, None]).to(query.dtype)
        tree_attention(
            asked,
            stored_rows(keys)[:, :, seen],
            stored_rows(values)[:, :, seen],
            own.tree_mask(end - rows, end),
            scale=scaling,
            window=window_of(module) if isinstance(sliding_window, str) else sliding_window,
            softcap=softcap,
            sinks=s_aux,
            chosen=None if indices is None else indices[:, place],
            out=out[:, place].transpose(1, 2),
            exact=own.exact,
        )
    rows = padded - tree.padding
    out[:, rows:] = out[:, rows - 1 : rows]
    return out, None


def window_of(module: torch.nn.Module) -> Window | None:
    """Return the configured window or chunk of a layer that passes none because its mask implements it."""
    config: Any = getattr(module, "config", None)
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds and index is not None and kinds[index] == "chunked_attention":
        return AttentionChunk(config.attention_chunk_size)
    if kinds and index is not None and kinds[index] != "sliding_attention":
        return None
    if getattr(config, "use_sliding_window", None) is False:
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window
