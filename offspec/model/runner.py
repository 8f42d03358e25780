"""Running a skeleton over the rows of a pass: hidden states first, logits only for rows that are asked for.

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

from offspec.core.replaced import replaced
from offspec.model import dense_mask
from offspec.model.apart import take_apart
from offspec.model.attention import MergedContext, TreeContext, running, running_context
from offspec.model.cache import TreeCache
from offspec.model.head import StreamedHead
from offspec.model.hops import Hops
from offspec.model.pass_parts import Part, SequenceRows, as_asked, joined, order_of, parts_of
from offspec.model.pass_time import DeviceTime, Spent, mark
from offspec.model.patches import wrap
from offspec.model.row_counts import RowCounts
from offspec.model.skeleton import Skeleton, way_to
from offspec.sampling.row_logprobs import RowLogprobs
from offspec_kernels.transfer import upload
from offspec_planners.cost import PROMPT_ROWS

# Rows that go through a layer together, which bounds the activations of a long prompt; and where memory is so
# tight that fewer make room for something better.
CHUNK, SMALL_CHUNK = 1024, 256
# Rows whose logits are made together: about as many as a walk that goes well visits, and a few more where
# they are nearly free.
_TOGETHER, _TOGETHER_ON_DEVICE = 12, 16
# Rows of a prompt in one pass, whose states wait between layers. Computing that many takes longer than a trip
# of the weights, so a longer prompt that takes several trips takes no more time.
PASS_ROWS = 16384
# Of a pass that other sequences share: their answers wait for it.
SHARED_PROMPT_ROWS = PROMPT_ROWS


class _Given(BaseModelOutputWithPast):
    """States, and nothing of what else the parts of one family or another return."""

    def __getattr__(self, name: str) -> None:
        return None


class TreeModel:
    """A causal LM with a tree cache. Its weights are bound by others (`enter`, `leave`).

    enter(i) and leave(i) are called around layer i, once a pass however many chunks run through it. head:
    given where the head streams, too. chunk: most rows that go through a layer together. row_counts: what
    row counts its products run at; rows that fill up to them are seen neither by attention nor by the cache,
    nor by a caller. None: whatever comes, as is good enough for a draft. mode: entered for a pass, where some
    of torch's own functions would not do. hops: given where layers are computed on several devices. spent: of
    the latest pass, on GPUs after its `read`; settle: called before a clock is read, instead. stalled: gives
    the seconds that layers have waited for their experts so far. on_layer: told how many layers are done;
    between: called before each layer and each chunk, and may raise to break the pass off. taps: layers whose
    inputs are kept aside, the number of layers for what leaves the last;
    tapped: those of the latest pass, [T, H] each.
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
        hops: Hops | None = None,
    ) -> None:
        self.skeleton = skeleton
        self._hops = hops
        self.row_counts = row_counts or RowCounts()
        self.mode = mode or nullcontext()
        self.chunk = chunk or CHUNK
        self._head, self._enter, self._leave = head, enter, leave
        self.cache = cache
        self.on_layer: Callable[[int], None] | None = None
        self.between: Callable[[], None] | None = None
        self.settle: Callable[[], None] | None = None
        self.stalled: Callable[[], float] = lambda: 0.0
        self.spent = Spent()
        self.taps: tuple[int, ...] = ()
        self.tapped: dict[int, torch.Tensor] = {}
        self._given: torch.Tensor | None = None
        self._parts: list[Part] = []  # of the pass that runs
        self._shown: SequenceRows  # whose cache and context the decoder is given
        self._arguments = [*signature(skeleton.layers[0].forward).parameters][1:]  # behind the states
        for part in (*way_to(skeleton.model, skeleton.decoder)[1:], skeleton.decoder):
            wrap(part, self._or_given)
        for index, layer in enumerate(skeleton.layers):
            if skeleton.apart:
                take_apart(layer, self.row_counts)
            wrap(layer, self._fed, index)

    @property
    def streams_head(self) -> bool:
        """Whether the head comes as the last units of a pass, which must then ask for logits."""
        return self._head is not None

    def _or_given(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """A part of the model that hands on the states that are there for the head, and makes none then."""
        return forward(*args, **kwargs) if self._given is None else _Given(last_hidden_state=self._given)

    def _fed(
        self, forward: Callable[..., Any], index: int, /, hidden: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if self.between is not None:
            self.between()
        asked = time.perf_counter()
        if self._enter is not None:
            self._enter(index)
        began, stalled = time.perf_counter(), self.stalled()
        place = hidden.device if self._hops is None else self._hops.places[index]
        beside = self._hops is not None and place.type == "cpu" != self._hops.home.type
        first = mark(place) if self.settle is None and not beside else None
        try:
            if index in self.taps:
                self.tapped[index] = self._tapped(hidden)
            if self._hops is None:
                out = self._in_parts(forward, hidden, args, kwargs)
            else:
                out = self._hops.run(index, partial(self._in_parts, forward), hidden, args, kwargs)
            if self.settle is not None:
                self.settle()
            inside = self.stalled() - stalled
            if first is None:
                computed = time.perf_counter() - began - inside
                self.spent.add(computed, began - asked + inside, beside=beside)
            else:
                last = mark(place)
                assert last is not None
                self.spent.add_timed(DeviceTime(place, first, last, began - asked, inside))
        finally:
            if self._leave is not None:
                self._leave(index)
        if index + 1 == len(self.skeleton.layers) and index + 1 in self.taps:
            self.tapped[index + 1] = self._tapped(out[0] if isinstance(out, tuple) else out)
        if self.on_layer is not None:
            self.on_layer(index + 1)
        return out

    def hidden(self, tokens: torch.Tensor, context: TreeContext) -> torch.Tensor:
        """Final hidden states [T, H] of tokens [T]; their keys and values are appended to the cache."""
        return self.hidden_of([SequenceRows(tokens, context, self.cache)])

    def hidden_of(self, sequences: Sequence[SequenceRows]) -> torch.Tensor:
        """Final hidden states [T, H] of several sequences, T rows in all, one sequence behind the other.

        Each layer is entered once for all of them. Keys and values are appended to each sequence's own cache.
        """
        self.spent, self.tapped = Spent(), {}
        merges = self.skeleton.merges and len(sequences) > 1
        self._parts = parts_of(
            sequences,
            self.chunk,
            self.row_counts,
            merges=merges,
            mixes=len(sequences) == 1 and self.skeleton.has_no_states,
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
            with self.mode, replaced(self.skeleton.functions), running(shown.context):
                out = self.skeleton.decoder(
                    input_ids=tokens[None],
                    position_ids=positions[None],
                    use_cache=True,
                    **{self.skeleton.cache_keyword: shown.cache},
                    **({} if self.skeleton.closed else {"tree": shown.context}),
                )
        finally:
            for rows in sequences:
                rows.context.padding = rows.cache.padding = 0
                rows.context.end = None
            if self._hops is not None:
                self._hops.forget()
        states: torch.Tensor = out.last_hidden_state
        return as_asked(states[0], self._parts)

    def _tapped(self, hidden: torch.Tensor) -> torch.Tensor:
        """A copy, since the states may be written over, where the model's other parts are."""
        # Families with several streams of states have the main one first: [..., T, H].
        kept = as_asked(hidden.flatten(0, -3)[0], self._parts)
        return kept.clone() if self._hops is None else kept.to(self._hops.home, copy=True)

    def _in_parts(
        self, forward: Callable[..., Any], hidden: torch.Tensor, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Run a layer over [..., T, H] part by part, slicing with it whatever is per row.

        The states of a long prompt are overwritten part by part, so that only one set of them waits. A layer
        that reads the keys of another meets those of later parts, too, and is told where its own part ends.
        """
        if running_context() is None:  # not a pass of this model's, but one of whole sequences
            return forward(hidden, *args, **kwargs)
        if self.skeleton.masked:
            args, kwargs = (), dict(zip(self._arguments, args, strict=False)) | kwargs
        beside, states = list[tuple[Any, ...]](), hidden
        for part in self._parts:
            if self.between is not None and len(self._parts) > 1:
                self.between()
            tree = part.begin(hidden.device)
            own = dict[str, Any]()
            if self.skeleton.masked:
                assert isinstance(tree, TreeContext)
                own = dense_mask.over_tree(kwargs, tree, part.rows)
            if len(self._parts) == len(part.pieces) == 1:
                return forward(hidden, *args, **kwargs | own)
            place, take = part.place, partial(self._taken, part, tree, hidden)
            given = {name: take(value) for name, value in kwargs.items()} | own
            with running(tree):
                out = forward(hidden[..., place, :], *map(take, args), **given)
            if len(self._parts) == 1:
                return out
            if isinstance(out, tuple):
                beside.append(out[1:])
                out = out[0]
            if out.dtype != states.dtype:  # a first layer that begins a sum in float32
                states = torch.empty_like(hidden, dtype=out.dtype)
            states[..., place, :] = out
        counts = [part.rows for part in self._parts]
        return (
            (states, *(_joined(found, counts) for found in zip(*beside, strict=True))) if beside else states
        )

    def _taken(self, part: Part, tree: TreeContext | MergedContext, hidden: torch.Tensor, value: Any) -> Any:
        """What a part gets of an argument of a layer that is for all R rows of all sequences."""
        if value is self._shown.cache:
            return part.cache()
        if isinstance(value, TreeContext):
            return tree
        if isinstance(value, MutableMapping) and any(of.sequence is not self._shown for of in part.pieces):
            own = part.left_in(value)
            return own if self._hops is None else self._hops.bring(own, hidden.device)
        return part.rows_of(value, hidden.shape[-2])

    def logits(self, hidden: torch.Tensor, scored: Sequence[RowLogprobs] = ()) -> torch.Tensor:
        """[n, H] to [n, V], through the family's own head: scaling and soft caps included.

        Where the head streams, that takes one trip of it, and belongs right behind a pass. scored: further
        rows, which only need log-probabilities; see `score` for a head that does not stream.
        """
        if self._head is not None:
            return self._head.logits(hidden, self._projected, scored)
        return self._projected(hidden)

    def score(self, scored: Sequence[RowLogprobs]) -> None:
        """Compute log-probabilities, by a head that does not stream."""
        for rows in scored:
            rows.add(self._projected)

    def _projected(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of rows, whose bits do not depend on their number."""
        rows, count = len(hidden), self.row_counts.padded(len(hidden))
        if count > rows:
            hidden = torch.cat([hidden, hidden[-1:].expand(count - rows, -1)])
        return self.project(hidden)[:rows]

    def rows_together(self, device: torch.device) -> int:
        """Rows whose logits are best made in one product, on a device that is that of the model."""
        return self.row_counts.padded(_TOGETHER if device.type == "cpu" else _TOGETHER_ON_DEVICE)

    def logits_by_row(self, hidden: torch.Tensor) -> Callable[[Sequence[int]], torch.Tensor]:
        """rows -> [n, V] of some of the rows [T, H]: made when they are asked for, or all of them now where
        the head streams."""
        if self._head is not None:
            every = self.logits(hidden)
            return lambda rows: rows_at(every, rows)
        return lambda rows: self.logits(rows_at(hidden, rows))

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same of a head that stays, at just as many rows: good enough for a draft."""
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
    """Some rows [n, H] of states [T, H]; nobody waits for a device."""
    (index,) = upload([rows], states.device)
    return states.index_select(0, index)


def _joined(values: Sequence[Any], counts: Sequence[int]) -> Any:
    """What a layer returned beside its states for each part of so many rows; anything else as of the last.

    Where it is keys that were selected, a part with fewer to select from has its last one again.
    """
    found = zip(values, counts, strict=True)
    if not all(isinstance(value, torch.Tensor) and value.shape[:2] == (1, rows) for value, rows in found):
        return values[-1]
    width = max(value.shape[-1] for value in values)
    wide = [torch.cat([value, *[value[..., -1:]] * (width - value.shape[-1])], dim=-1) for value in values]
    return torch.cat(wide, dim=1)
