"""What a position really takes in the cache: the layers are run as far as their attention, and looked at.

No formula knows it: latent attention keeps a latent and expands it for every pass, layers differ in heads and
widths, and some keep nothing because they read what another has kept.

Letters: T rows of a pass, S keys, H heads, KV key heads, D and E sizes of a key and of a value.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from offspec.core.errors import UnsupportedModelError
from offspec.core.replaced import replaced
from offspec.model.attention import TreeContext, running
from offspec.model.cache import TreeCache
from offspec.model.patches import implementation, wrap
from offspec_kernels.tree_attention import MOST_NUMBERS

_NAME = "offspec_shapes"
_ROWS = 3
_SLOTS = 4  # layers of the cache that a layer of the model may have, at most


@dataclass(frozen=True, slots=True)
class CacheRows:
    """Numbers that each position takes.

    Args:
        kept: By layer of the cache, numbers that are kept: keys and values, and an index's keys.
        index: By layer of the cache, those of them that are an index's keys.
        key_heads: By layer of the cache, heads of keys and of values, together.
        expanded: Most numbers that a layer makes of what is kept for each position, for one pass.
        products: By layer of the model, multiplications of a query's row with a key's and with a value's.
        heads: Most heads of a layer's queries.
        groups: Most heads of queries for one head of keys.
        head_size: Most numbers of a head's key or value.
        state_numbers: Of the states that all layers carry from token to token, in float32; not by position.
        tail_numbers: Of the tokens that their convolutions look back at.
        row_numbers: That layers keep of a row of a tree until it is committed, beside its keys and values.
    """

    kept: tuple[int, ...] = ()
    index: tuple[int, ...] = ()
    key_heads: tuple[int, ...] = ()
    expanded: int = 0
    products: tuple[int, ...] = ()
    heads: int = 1
    groups: int = 1
    head_size: int = MOST_NUMBERS
    state_numbers: int = 0
    tail_numbers: int = 0
    row_numbers: int = 0


NOTHING_KEPT = CacheRows()


class _AttentionError(Exception):
    """Ends a layer at its attention: what comes behind it keeps nothing. indices: of keys it had selected."""

    def __init__(self, indices: torch.Tensor | None) -> None:
        super().__init__()
        self.indices = indices


@dataclass(slots=True)
class _Seen:
    """What the attention of each layer was given."""

    cache: TreeCache
    expanded: int = 0
    products: list[int] = field(default_factory=list)
    heads: int = 1
    groups: int = 1
    head_size: int = 1

    def look(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        kept = {_storage(store) for row in self.cache.rows for store in row.stores}
        made = {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in (key, value)}
        numbers = sum(size for storage, size in made.items() if storage not in kept) // key.dtype.itemsize
        self.expanded = max(self.expanded, numbers // key.shape[2])
        self._note(query.shape[1], key, value)

    def _note(self, heads: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.heads, self.groups = max(self.heads, heads), max(self.groups, heads // key.shape[1])
        self.head_size = max(self.head_size, key.shape[3], value.shape[3])
        self.products.append(heads * (key.shape[3] + value.shape[3]))

    def look_at_cache(self, heads: int) -> None:
        """The same of layers whose attention is not seen, from what they keep."""
        for row in self.cache.rows:
            if row.keys is not None and row.values is not None:
                self._note(heads, row.keys, row.values)


def measure_rows(skeleton: Any, wraps: int = 0) -> CacheRows:
    """The numbers of a model, whose weights are neither there nor needed.

    Args:
        skeleton: On the meta device.
        wraps: Of how many values the tuples are that its layers return. Default 0: they return no tuples.

    Raises:
        UnsupportedModelError: It cannot be run so.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attend)
    cache = TreeCache(_SLOTS * len(skeleton.layers), _ROWS)
    seen = _Seen(cache)
    siblings = torch.eye(_ROWS, dtype=torch.bool)
    context = TreeContext(0, torch.zeros(_ROWS, dtype=torch.long), 0, siblings, end=_ROWS)
    ours = not skeleton.closed
    given: dict[str, Any] = {"tree": seen} if ours else {}
    if ours and skeleton.masked:
        given["attention_mask"] = torch.ones(1, 1, _ROWS, _ROWS, dtype=torch.bool)
    try:
        with (
            torch.no_grad(),
            implementation(skeleton.model, **({"attention": _NAME} if ours else {})),
            _ending_at_attention(skeleton.layers, wraps) if ours else nullcontext(),
            replaced(skeleton.functions),
            running(context),
            _WithoutWeights(),
        ):
            skeleton.decoder(
                input_ids=torch.ones(1, _ROWS, dtype=torch.long),
                position_ids=torch.arange(_ROWS)[None],
                use_cache=True,
                **{skeleton.cache_keyword: cache},
                **given,
            )
        if skeleton.closed:
            seen.look_at_cache(int(skeleton.config.num_attention_heads))
    except Exception as error:  # code of any family, which was made for weights
        reason = f"what it keeps of a token cannot be measured ({error}".splitlines()[0]
        raise UnsupportedModelError(f"{reason})") from error
    kept = list(cache.row_sizes)
    while len(kept) > len(skeleton.layers) and not kept[-1]:
        kept.pop()
    rows = cache.rows[: len(kept)]
    carried, item = cache.recurrences.values(), next(skeleton.model.parameters()).dtype.itemsize
    return CacheRows(
        tuple(kept),
        tuple(0 if row.index_keys is None else row.index_keys.shape[3] for row in rows),
        tuple(sum(of.shape[1] for of in (row.keys, row.values) if of is not None) for row in rows),
        seen.expanded,
        tuple(seen.products),
        seen.heads,
        seen.groups,
        seen.head_size,
        sum(recurrence.state_numbers for recurrence in carried),
        sum(recurrence.tail_numbers for recurrence in carried),
        sum(recurrence.row_bytes for recurrence in carried) // (_ROWS * item),
    )


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    tree: _Seen | None = None,
    indices: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, T, D], key [1, KV, S, D], value [1, KV, S, E]."""
    assert tree is not None
    tree.look(query, key, value)
    raise _AttentionError(indices)


@contextmanager
def _ending_at_attention(layers: Any, wraps: int) -> Iterator[None]:
    """Layers that hand on their input as soon as their attention was called."""

    def end(forward: Callable[..., Any], hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        try:
            return forward(hidden, *args, **kwargs)
        except _AttentionError as ended:
            beside = [None] * (wraps - 1)
            return (hidden, *[ended.indices, *beside][: wraps - 1]) if wraps else hidden

    with ExitStack() as stack:
        for layer in layers:
            stack.callback(wrap(layer, end))
        yield


class _WithoutWeights(TorchFunctionMode):
    """Computes with zeros where a parameter is on the meta device, and leaves large products out.

    On the meta device itself torch would import its compiler, which takes a second and much memory.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.nn.functional.linear:
            given, weight = args[0], args[1] if len(args) > 1 else kwargs["weight"]
            return given.new_zeros(*given.shape[:-1], weight.shape[0])
        if getattr(function, "__name__", "") == "__get__":
            found = function(*args, **kwargs)
            return torch.device("cpu") if found == torch.device("meta") else found
        return function(*_zeros(args), **{name: _zeros(value) for name, value in kwargs.items()})


def _zeros(value: Any) -> Any:
    """In the place of a tensor on the meta device, one that takes no memory either."""
    if isinstance(value, torch.Tensor) and value.is_meta:
        return torch.zeros((), dtype=value.dtype).expand(value.shape)
    return type(value)(map(_zeros, value)) if type(value) in (list, tuple) else value


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
