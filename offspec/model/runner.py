"""Running a skeleton over the rows of a pass: hidden states first, logits only for rows that are asked for.

Letters: T rows of a pass, H hidden size, V vocabulary.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import ModelOutput

from offspec.model.attention import TreeContext
from offspec.model.cache import TreeCache
from offspec.model.head import StreamedHead
from offspec.model.skeleton import Skeleton
from offspec_kernels.chunks import split_evenly

# Rows that go through a layer together, which bounds the activations of a long prompt; and where memory is so
# tight that fewer make room for something better.
CHUNK, SMALL_CHUNK = 1024, 256
_TOGETHER = 12  # rows whose logits are made together: about as many as a walk that goes well visits


@dataclass(slots=True)
class Spent:
    """Where a pass's time went: layers that are done, seconds computed in them, seconds waited for them."""

    layers: int = 0
    computed: float = 0.0
    waited: float = 0.0


class TreeModel:
    """A causal LM with a tree cache. Its weights are bound by others (`enter`, `leave`).

    enter(i) and leave(i) are called around layer i, once a pass however many chunks run through it. head:
    given where the head streams, too. chunk: most rows that go through a layer together. spent: of the
    latest pass; settle: called before a clock is read, where work goes on after a call returns. on_layer:
    told how many layers are done; between: called before each layer and each chunk, and may raise to break
    the pass off. taps: layers whose inputs are kept aside, the number of layers for what leaves the last;
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
    ) -> None:
        self.skeleton = skeleton
        self.chunk = chunk or CHUNK
        self._head = head
        self.cache = cache
        self.on_layer: Callable[[int], None] | None = None
        self.between: Callable[[], None] | None = None
        self.settle: Callable[[], None] | None = None
        self.spent = Spent()
        self.taps: tuple[int, ...] = ()
        self.tapped: dict[int, torch.Tensor] = {}
        self._given: torch.Tensor | None = None
        self._output: type[ModelOutput] = BaseModelOutputWithPast  # what this family's decoder returns
        decoder_forward = skeleton.decoder.forward

        def decode(*args: Any, **kwargs: Any) -> Any:
            if self._given is not None:
                return self._output(last_hidden_state=self._given)
            return decoder_forward(*args, **kwargs)

        skeleton.decoder.forward = decode
        for index, layer in enumerate(skeleton.layers):
            layer.forward = self._fed(index, layer.forward, enter, leave)

    @property
    def streams_head(self) -> bool:
        """Whether the head comes as the last units of a pass, which must then ask for logits."""
        return self._head is not None

    def _fed(
        self,
        index: int,
        forward: Callable[..., Any],
        enter: Callable[[int], None] | None,
        leave: Callable[[int], None] | None,
    ) -> Callable[..., Any]:
        def run(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.between is not None:
                self.between()
            asked = time.perf_counter()
            if enter is not None:
                enter(index)
            began = time.perf_counter()
            try:
                if index in self.taps:
                    self.tapped[index] = hidden[0].clone()  # a layer may write over its input
                out = _in_chunks(forward, hidden, self.chunk, self.between, args, kwargs)
                if self.settle is not None:
                    self.settle()
                self.spent.layers += 1
                self.spent.computed += time.perf_counter() - began
                self.spent.waited += began - asked
            finally:
                if leave is not None:
                    leave(index)
            if index + 1 == len(self.skeleton.layers) and index + 1 in self.taps:
                self.tapped[index + 1] = (out[0] if isinstance(out, tuple) else out)[0].clone()
            if self.on_layer is not None:
                self.on_layer(index + 1)
            return out

        return run

    def hidden(self, tokens: torch.Tensor, context: TreeContext) -> torch.Tensor:
        """Final hidden states [T, H] of tokens [T]; their keys and values are appended to the cache."""
        rows = len(tokens)
        self.spent, self.tapped = Spent(), {}
        out = self.skeleton.decoder(
            input_ids=tokens[None],
            position_ids=context.position[-rows:][None],
            past_key_values=self.cache,
            use_cache=True,
            tree=context,
        )
        self._output = type(out)
        states: torch.Tensor = out.last_hidden_state
        return states[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] to [n, V], through the family's own head: scaling and soft caps included.

        Where the head streams, that takes one trip of it, and belongs right behind a pass.
        """
        if self._head is not None:
            return self._head.logits(hidden, self._project)
        return self._project(hidden)

    @property
    def rows_together(self) -> int:
        """Rows whose logits are made in one product: in float32 those of few and of many round otherwise."""
        return 1 if self.skeleton.model.dtype == torch.float32 else _TOGETHER

    def logits_by_row(
        self, hidden: torch.Tensor, likely: Sequence[int] = ()
    ) -> Callable[[int], torch.Tensor]:
        """row -> [V]: made when it is asked for, or all of them now where the head streams.

        Args:
            hidden: [n, H].
            likely: Rows in the order in which they are likely to be asked for. The first of them are made
                together: the product of a few rows takes as long as that of one, the time to read the head.
        """
        if self._head is not None:
            rows = self._head.logits(hidden, self._project)
            return lambda row: rows[row]
        first = tuple(likely[: self.rows_together])
        made: dict[int, torch.Tensor] = {}

        def logits(row: int) -> torch.Tensor:
            if row not in made:
                together = list(first) if not made and row in first else [row]
                # At least a pair, since the product of a single row rounds otherwise than that of many: what
                # is said must not depend on who is asked for together.
                together *= 2 if len(together) == 1 else 1
                made.update(zip(together, self._project(hidden[together]), strict=True))
            return made[row]

        return logits

    def _project(self, hidden: torch.Tensor) -> torch.Tensor:
        self._given = hidden[None]
        try:
            out = self.skeleton.model(
                input_ids=torch.zeros((1, len(hidden)), dtype=torch.long, device=hidden.device)
            )
        finally:
            self._given = None
        rows: torch.Tensor = out.logits
        return rows[0]


def _in_chunks(
    forward: Callable[..., Any],
    hidden: torch.Tensor,
    chunk: int,
    between: Callable[[], None] | None,
    args: Any,
    kwargs: dict[str, Any],
) -> Any:
    """Run a layer over [..., T, H] in chunks of rows, slicing with it whatever is per row.

    The states of a long prompt are overwritten chunk by chunk, so that only one set of them waits. A layer
    that reads the keys of another meets those of later chunks, too, and is told where its own chunk ends.
    """
    rows, tree = hidden.shape[-2], kwargs.get("tree")
    parts = _chunks(rows, chunk, tree)
    if len(parts) == 1:
        return forward(hidden, *args, **kwargs)
    wrapped = False
    for part in parts:
        if between is not None:
            between()
        sliced = {name: _rows(value, part, rows) for name, value in kwargs.items()}
        if tree is not None:
            tree.end = len(tree.position) - rows + part.stop
        out = forward(hidden[..., part, :], *(_rows(value, part, rows) for value in args), **sliced)
        wrapped = isinstance(out, tuple)
        hidden[..., part, :] = out[0] if wrapped else out
    return (hidden,) if wrapped else hidden


def _chunks(rows: int, chunk: int, tree: TreeContext | None) -> list[slice]:
    """At most `chunk` rows each, and none with rows of both the prompt and a tree.

    In bfloat16 the shape of a product can move its last bit. Kept apart, the keys and values of a prompt
    are the same whatever tree, or none, rides behind it.
    """
    prompt = max(tree.causal - (len(tree.position) - rows), 0) if tree is not None else 0
    return split_evenly(0, prompt, chunk) + split_evenly(prompt, rows, chunk)


def _rows(value: Any, part: slice, rows: int) -> Any:
    """The rows of a per-row tensor ([1, T, ...], [1, 1, T, ...], tuples of them); anything else as it is."""
    if isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[0] == 1:
        if value.shape[1] == rows:
            return value[:, part]
        if value.dim() >= 3 and value.shape[1] == 1 and value.shape[2] == rows:
            return value[:, :, part]
    if isinstance(value, tuple):
        return tuple(_rows(item, part, rows) for item in value)
    return value
