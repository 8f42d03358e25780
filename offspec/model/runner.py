"""Execution of a skeleton over the rows of a pass: hidden states first, logits only for requested rows.

Letters: T rows of a pass, H hidden size, V vocabulary.
"""

import time
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import nullcontext
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers.modeling_outputs import BaseModelOutputWithPast

from offspec.core.monkeypatch import monkeypatched
from offspec.model import dense_mask
from offspec.model.attention import MergedContext, TreeContext, current_context, pass_context
from offspec.model.attention_per_sequence import attend_per_sequence
from offspec.model.cache import TreeCache
from offspec.model.device_transfers import DeviceTransfers
from offspec.model.head import StreamedHead
from offspec.model.pass_parts import PassPart, SequenceRows, joined, order_of, split_pass, to_input_order
from offspec.model.pass_time import LayerTime, PassTime, record_event
from offspec.model.patches import wrap
from offspec.model.row_counts import RowCounts
from offspec.model.skeleton import Skeleton, module_path
from offspec.sampling.row_logprobs import RowLogprobs
from offspec_kernels.transfer import upload
from offspec_planners.cost import PROMPT_ROWS

# Rows that go through a layer together, which bounds the activations of a long prompt. The smaller value is
# for tight memory, if the difference can be put to better use.
CHUNK, SMALL_CHUNK = 1024, 256
# Rows whose logits are computed together: about as many as a successful verification visits, and a few more
# on a GPU, where they are nearly free.
_TOGETHER, _TOGETHER_ON_DEVICE = 12, 16
# Maximum prompt rows in one pass, whose states are all kept between layers. Computing that many takes longer
# than one transfer of the weights, so splitting a longer prompt into several passes costs no extra time.
PASS_ROWS = 16384
# Maximum prompt rows in a pass shared with other sequences, which delays their answers.
SHARED_PROMPT_ROWS = PROMPT_ROWS


class _Given(BaseModelOutputWithPast):
    """Model output with hidden states only; all other attributes are None, whatever the model family."""

    def __getattr__(self, name: str) -> None:
        return None


class TreeModel:
    """Causal language model with a tree cache, whose weights are bound by `enter` and unbound by `leave`.

    Attributes:
        pass_time: Time of the latest pass; for GPUs, call its `read` first.
        synchronize: If set, called before a clock is read, instead of recording events.
        expert_wait_seconds: Returns the total seconds that layers have waited for their experts so far.
        on_layer: Called with the number of finished layers.
        check_cancelled: Called before each layer and each chunk; may raise to cancel the pass.
        aux_layers: Layers whose inputs are kept; the number of layers stands for the output of the last.
        aux_hidden_states: Hidden states kept in the latest pass, [T, H] each.

    Args:
        skeleton: Model structure.
        cache: Cache of keys and values.
        enter: enter(i) is called before layer i, once per pass for all chunks.
        leave: leave(i) is called after layer i, once per pass for all chunks.
        head: Streamed head, if the head is streamed.
        chunk: Maximum rows that go through a layer together.
        row_counts: Row counts that products run at. Rows added as padding are invisible to attention, cache
            and callers. None: any row count, which is sufficient for a draft.
        mode: Mode entered for a pass, which replaces torch functions that give a row other bits.
        device_transfers: Transfers between devices, if layers are computed on several.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        cache: TreeCache,
        *,
        enter: Callable[[int], None] | None = None,
        leave: Callable[[int], None] | None = None,
        head: StreamedHead | None = None,
        chunk: int | None = None,
        row_counts: RowCounts | None = None,
        mode: TorchFunctionMode | None = None,
        device_transfers: DeviceTransfers | None = None,
    ) -> None:
        self.skeleton = skeleton
        self._transfers = device_transfers
        self.row_counts = row_counts or RowCounts()
        self.mode = mode or nullcontext()
        self.chunk = chunk or CHUNK
        self._head, self._enter, self._leave = head, enter, leave
        self.cache = cache
        self.on_layer: Callable[[int], None] | None = None
        self.check_cancelled: Callable[[], None] | None = None
        self.synchronize: Callable[[], None] | None = None
        self.expert_wait_seconds: Callable[[], float] = lambda: 0.0
        self.pass_time = PassTime()
        self.aux_layers: tuple[int, ...] = ()
        self.aux_hidden_states: dict[int, torch.Tensor] = {}
        self._given: torch.Tensor | None = None
        self._parts: list[PassPart] = []  # of the current pass
        self._shown: SequenceRows  # whose cache and context are passed to the decoder
        self._arguments = [*signature(skeleton.layers[0].forward).parameters][1:]  # after the hidden states
        for part in (*module_path(skeleton.model, skeleton.decoder)[1:], skeleton.decoder):
            wrap(part, self._or_given)
        for index, layer in enumerate(skeleton.layers):
            if skeleton.attention_per_sequence:
                attend_per_sequence(layer, self.row_counts)
            wrap(layer, self._run_layer, index)

    @property
    def streams_head(self) -> bool:
        """Whether the head is streamed as the last units of a pass, which must then compute logits."""
        return self._head is not None

    def _or_given(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a part of the model, or return the states given for the head without running it."""
        return forward(*args, **kwargs) if self._given is None else _Given(last_hidden_state=self._given)

    def _run_layer(
        self, forward: Callable[..., Any], index: int, /, hidden: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if self.check_cancelled is not None:
            self.check_cancelled()
        asked = time.perf_counter()
        if self._enter is not None:
            self._enter(index)
        began, stalled = time.perf_counter(), self.expert_wait_seconds()
        place = hidden.device if self._transfers is None else self._transfers.places[index]
        on_cpu = self._transfers is not None and place.type == "cpu" != self._transfers.home.type
        first = record_event(place) if self.synchronize is None and not on_cpu else None
        try:
            if index in self.aux_layers:
                self.aux_hidden_states[index] = self._keep_states(hidden)
            if self._transfers is None:
                out = self._in_parts(forward, hidden, args, kwargs)
            else:
                out = self._transfers.run(index, partial(self._in_parts, forward), hidden, args, kwargs)
            if self.synchronize is not None:
                self.synchronize()
            inside = self.expert_wait_seconds() - stalled
            if first is None:
                computed = time.perf_counter() - began - inside
                self.pass_time.add(computed, began - asked + inside, on_cpu=on_cpu)
            else:
                last = record_event(place)
                assert last is not None
                self.pass_time.add_timed(LayerTime(place, first, last, began - asked, inside))
        finally:
            if self._leave is not None:
                self._leave(index)
        if index + 1 == len(self.skeleton.layers) and index + 1 in self.aux_layers:
            self.aux_hidden_states[index + 1] = self._keep_states(out[0] if isinstance(out, tuple) else out)
        if self.on_layer is not None:
            self.on_layer(index + 1)
        return out

    def hidden(self, tokens: torch.Tensor, context: TreeContext) -> torch.Tensor:
        """Return final hidden states [T, H] of tokens [T], appending keys and values to the cache."""
        return self.hidden_of([SequenceRows(tokens, context, self.cache)])

    def hidden_of(self, sequences: Sequence[SequenceRows]) -> torch.Tensor:
        """Return final hidden states [T, H] of several consecutive sequences with T total rows.

        Each layer is entered once for all sequences. Keys and values are appended to each sequence's own
        cache.
        """
        self.pass_time, self.aux_hidden_states = PassTime(), {}
        merges = self.skeleton.supports_batching and len(sequences) > 1
        self._parts = split_pass(
            sequences,
            self.chunk,
            self.row_counts,
            merges=merges,
            mixes=len(sequences) == 1 and self.skeleton.is_stateless,
        )
        tokens = joined([rows.tokens for rows in sequences])
        positions = joined([rows.context.position[-len(rows.tokens) :] for rows in sequences])
        if merges or any(part.padding for part in self._parts):
            (order,) = upload([order_of(self._parts).numpy()], tokens.device)
            tokens, positions = tokens[order], positions[order]
        self._shown = shown = max(
            sequences, key=lambda rows: rows.cache.length
        )  # a mask spans every position
        for rows in sequences:
            rows.context.masked = self.skeleton.masked
        try:
            with self.mode, monkeypatched(self.skeleton.functions), pass_context(shown.context):
                out = self.skeleton.decoder(
                    input_ids=tokens[None],
                    position_ids=positions[None],
                    use_cache=True,
                    **{self.skeleton.cache_keyword: shown.cache},
                    **({} if self.skeleton.own_attention else {"tree": shown.context}),
                )
        finally:
            for rows in sequences:
                rows.context.padding = rows.cache.padding = 0
                rows.context.end = None
            if self._transfers is not None:
                self._transfers.forget()
        states: torch.Tensor = out.last_hidden_state
        return to_input_order(states[0], self._parts)

    def _keep_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return a copy of hidden states on the home device; the original may be overwritten."""
        # In models with several streams of hidden states the main stream is first: [..., T, H].
        kept = to_input_order(hidden.flatten(0, -3)[0], self._parts)
        return kept.clone() if self._transfers is None else kept.to(self._transfers.home, copy=True)

    def _in_parts(
        self, forward: Callable[..., Any], hidden: torch.Tensor, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Run a layer over [..., T, H] part by part, slicing all per-row arguments.

        The states of a long prompt are overwritten part by part, so that only one set of states is kept. A
        layer that reads another layer's keys also sees those of later parts; the context has the end of its
        own part.
        """
        if current_context() is None:  # a forward over whole sequences, not a pass of this model
            return forward(hidden, *args, **kwargs)
        if self.skeleton.masked:
            args, kwargs = (), dict(zip(self._arguments, args, strict=False)) | kwargs
        extras, states = list[tuple[Any, ...]](), hidden
        for part in self._parts:
            if self.check_cancelled is not None and len(self._parts) > 1:
                self.check_cancelled()
            tree = part.begin(hidden.device)
            own = dict[str, Any]()
            if self.skeleton.masked:
                assert isinstance(tree, TreeContext)
                own = dense_mask.dense_tree_arguments(kwargs, tree, part.rows)
            if len(self._parts) == len(part.pieces) == 1:
                return forward(hidden, *args, **kwargs | own)
            place, take = part.place, partial(self._taken, part, tree, hidden)
            given = {name: take(value) for name, value in kwargs.items()} | own
            with pass_context(tree):
                out = forward(hidden[..., place, :], *map(take, args), **given)
            if len(self._parts) == 1:
                return out
            if isinstance(out, tuple):
                extras.append(out[1:])
                out = out[0]
            if out.dtype != states.dtype:  # a first layer that starts a float32 residual stream
                states = torch.empty_like(hidden, dtype=out.dtype)
            states[..., place, :] = out
        counts = [part.rows for part in self._parts]
        return (
            (states, *(_joined(found, counts) for found in zip(*extras, strict=True))) if extras else states
        )

    def _taken(
        self, part: PassPart, tree: TreeContext | MergedContext, hidden: torch.Tensor, value: Any
    ) -> Any:
        """Return a part's share of a layer argument that covers all R rows of all sequences."""
        if value is self._shown.cache:
            return part.cache()
        if isinstance(value, TreeContext):
            return tree
        if isinstance(value, MutableMapping) and any(of.sequence is not self._shown for of in part.pieces):
            own = part.left_in(value)
            return own if self._transfers is None else self._transfers.to_device(own, hidden.device)
        return part.rows_of(value, hidden.shape[-2])

    def logits(self, hidden: torch.Tensor, scored: Sequence[RowLogprobs] = ()) -> torch.Tensor:
        """Return logits [n, V] of hidden states [n, H] from the model's own head, with scaling and soft caps.

        A streamed head is read once per call, which must directly follow a pass.

        Args:
            hidden: [n, H] hidden states.
            scored: Additional rows that need only log-probabilities, for a streamed head; otherwise see
                `score`.
        """
        if self._head is not None:
            return self._head.logits(hidden, self._projected, scored)
        return self._projected(hidden)

    def score(self, scored: Sequence[RowLogprobs]) -> None:
        """Compute log-probabilities with a resident head."""
        for rows in scored:
            rows.add(self._projected)

    def _projected(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of rows, with bits that do not depend on the number of rows."""
        rows, count = len(hidden), self.row_counts.padded(len(hidden))
        if count > rows:
            hidden = torch.cat([hidden, hidden[-1:].expand(count - rows, -1)])
        return self.project(hidden)[:rows]

    def rows_together(self, device: torch.device) -> int:
        """Return the best number of rows for one product of logits on the model's device."""
        return self.row_counts.padded(_TOGETHER if device.type == "cpu" else _TOGETHER_ON_DEVICE)

    def logits_by_row(self, hidden: torch.Tensor) -> Callable[[Sequence[int]], torch.Tensor]:
        """Return a function from row indices to logits [n, V] of hidden states [T, H].

        It computes logits on demand. With a streamed head, all logits are computed now.
        """
        if self._head is not None:
            every = self.logits(hidden)
            return lambda rows: rows_at(every, rows)
        return lambda rows: self.logits(rows_at(hidden, rows))

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of a resident head without padding rows, which is sufficient for a draft."""
        self._given = hidden[None]
        try:
            with self.mode:
                out = self.skeleton.model(
                    input_ids=torch.zeros((1, len(hidden)), dtype=torch.long, device=hidden.device)
                )
        finally:
            self._given = None
        rows: torch.Tensor = out.logits
        return rows[0]


def rows_at(states: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return some rows [n, H] of states [T, H] without synchronizing with the device."""
    (index,) = upload([rows], states.device)
    return states.index_select(0, index)


def _joined(values: Sequence[Any], counts: Sequence[int]) -> Any:
    """Concatenate an additional per-row output of a layer over all parts; return any other value of the last.

    If the output is selected keys, a part with fewer keys to select from repeats its last one.
    """
    found = zip(values, counts, strict=True)
    if not all(isinstance(value, torch.Tensor) and value.shape[:2] == (1, rows) for value, rows in found):
        return values[-1]
    width = max(value.shape[-1] for value in values)
    wide = [torch.cat([value, *[value[..., -1:]] * (width - value.shape[-1])], dim=-1) for value in values]
    return torch.cat(wide, dim=1)
