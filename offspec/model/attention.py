"""Attention over a committed prefix and a token tree, registered with transformers as "offspec_tree".

Letters: L prefix rows, T new rows of this pass, S = L + new rows so far, H heads, KV key heads, D head size.
The model is called with `tree=TreeContext(...)`, which reaches this function as a keyword.
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
from offspec.model.key_tensors import parts_in, stored_rows
from offspec.model.positions import position_scale
from offspec.model.torch_functions import never_watched
from offspec_kernels.transfer import upload
from offspec_kernels.tree_attention import Chunk, Window, tree_attention
from offspec_kernels.tree_mask import TreeExtent, TreeMask, pack_rows

NAME = "offspec_tree"
UNSAID = "not said"


@dataclass(slots=True)
class TreeContext:
    """Which rows see which in one pass.

    Args:
        prefix: L committed rows, seen by every new row.
        position: [M] int64, absolute position of every row behind the prefix, those of this pass last.
        causal: Of these M rows, the first that are a plain chain (each sees those before it); the others see
            all of the chain and part of the tree.
        ancestors: [M - causal, M - causal] bool, which rows of the tree each row of the tree sees. It is best
            on the CPU: rows are packed there, and those alone that a pass is over go to a device.
        exact: Whether a row's bits are to depend on its own path alone, as a target's must.
        padding: Rows behind those that go through a layer now, copies of the last of them: they have no keys
            and look at nothing.
        end: Of these M rows, those up to the last that runs now; None where the keys end with it.
        kept: What layers have found out of all this, for those behind them.
        tokens: [T] of this pass on the CPU, where they are known there.
        masked: Whether layers are given the same as a dense mask, for other use than attention's.
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
        """Plain causal text from position 0 on, nothing before it."""
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
        """Tokens [T] on the device and the context of their pass, by one copy that nobody waits for.

        Args:
            tokens: Of the last T of the M rows behind the prefix.
            position: [M], absolute.
            sees: [M - causal, M - causal], `ancestors`. On a CPU its memory is shared.
            prefix: As above.
            causal: As above.
            device: Of the pass.
            exact: As above.
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
        """The same pass for layers on that device, itself where it is there."""
        if self.position.device == device:
            return self
        if device not in self._elsewhere:
            there, masked = self.position.to(device), self.masked
            self._elsewhere[device] = TreeContext(
                self.prefix, there, self.causal, self.ancestors, self.exact, masked=masked, tokens=self.tokens
            )
        return self._elsewhere[device]

    def pieces(self, padded: int) -> "list[tuple[TreeContext, slice]]":
        """Of so many rows that run, copies included: those that are none, which are all of one sequence."""
        return [(self, slice(0, padded - self.padding))]

    def tree_mask(self, start: int, end: int) -> TreeMask:
        """What rows start to end, counted behind the prefix, may look at; kept for the next layer."""
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
    """The contexts of several sequences whose rows go through a layer together.

    Args:
        contexts: Of the sequences, each told where the rows that run end.
        places: Of each which rows are its own.
        padding: Rows behind all of them, as in a `TreeContext`.
    """

    contexts: tuple[TreeContext, ...]
    places: tuple[slice, ...]
    padding: int
    masked: bool = False

    def pieces(self, padded: int) -> list[tuple[TreeContext, slice]]:
        """Of the rows that run, each sequence's with its context."""
        return [*zip(self.contexts, self.places, strict=True)]


def _seen(sees: NDArray[np.bool_], of: TreeExtent) -> NDArray[np.bool_]:
    """[count, R] bool: the rows of the tree up to the last of these that each of them sees."""
    columns = max(of.first + of.count - of.causal, 0)
    seen = np.zeros((of.count, columns), np.bool_)
    chain = min(max(of.causal - of.first, 0), of.count)  # rows of the chain, which see no tree
    seen[chain:] = sees[max(of.first - of.causal, 0) : columns, :columns]
    return seen


_RUNNING: ContextVar[TreeContext | MergedContext | None] = ContextVar("running", default=None)


@contextmanager
def running(context: TreeContext | MergedContext) -> Iterator[None]:
    """While the block runs, layers of this thread belong to a pass."""
    token = _RUNNING.set(context)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def running_context() -> TreeContext | MergedContext | None:
    """That of the pass which runs in this thread."""
    return _RUNNING.get()


@never_watched
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
    """query [1, H, T, D], key and value [1, KV, S, D] to ([1, T, H, D], None).

    Rows of several sequences attend to the keys of their own, each to what it would alone.

    `s_aux` [H] are attention sinks, `indices` [1, T, K] the keys that an index has selected.
    Raises UnsupportedModelError where the family loses the keyword.
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
    """The window or chunk of a layer that leaves it to its mask: what the configuration says."""
    config: Any = getattr(module, "config", None)
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds and index is not None and kinds[index] == "chunked_attention":
        return Chunk(config.attention_chunk_size)
    if kinds and index is not None and kinds[index] != "sliding_attention":
        return None
    if getattr(config, "use_sliding_window", None) is False:
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window
