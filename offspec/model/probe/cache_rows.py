"""Measurement of the cache size per position: layers run up to their attention, and their stores are sized.

No formula gives these sizes: latent attention caches a latent and expands it in every pass, layers differ in
heads and widths, and some cache nothing because they read another layer's cache.

Letters: T rows of a pass, S keys, H heads, KV key heads, D and E sizes of a key and of a value.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from offspec.core.errors import UnsupportedModelError
from offspec.core.monkeypatch import monkeypatched
from offspec.model.attention import TreeContext, pass_context
from offspec.model.cache import TreeCache
from offspec.model.patches import implementation, wrap
from offspec_kernels.tree_attention import MOST_NUMBERS

_NAME = "offspec_shapes"
_ROWS = 3
_SLOTS = 4  # maximum cache layers per model layer


@dataclass(frozen=True, slots=True)
class CacheRows:
    """Sizes of a model's cache and attention, as counts of numbers.

    Args:
        kept: By cache layer, numbers per position: keys, values and index keys.
        index: By cache layer, numbers of index keys among these.
        key_heads: By cache layer, total heads of keys and of values.
        expanded: Maximum temporary numbers per position that a layer computes from its cache in a pass.
        products: By model layer, multiplications of a query row with one key and one value.
        heads: Maximum query heads of a layer.
        groups: Maximum query heads per key head.
        head_size: Maximum numbers of a head's key or value.
        state_numbers: Total numbers of all recurrent states, in float32, independent of the position.
        tail_numbers: Total numbers of the inputs that convolutions look back at.
        row_numbers: Numbers that layers keep per tree row until the commit, in addition to keys and values.
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
    """Ends a layer at its attention, after which nothing is cached. `indices`: keys selected by an index."""

    def __init__(self, indices: torch.Tensor | None) -> None:
        super().__init__()
        self.indices = indices


@dataclass(slots=True)
class _Seen:
    """Sizes observed in each layer's call of attention."""

    cache: TreeCache
    expanded: int = 0
    products: list[int] = field(default_factory=list)
    heads: int = 1
    groups: int = 1
    head_size: int = 1

    def observe(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        kept = {_storage(store) for row in self.cache.rows for store in row.stores}
        made = {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in (key, value)}
        numbers = sum(size for storage, size in made.items() if storage not in kept) // key.dtype.itemsize
        self.expanded = max(self.expanded, numbers // key.shape[2])
        self._note(query.shape[1], key, value)

    def _note(self, heads: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.heads, self.groups = max(self.heads, heads), max(self.groups, heads // key.shape[1])
        self.head_size = max(self.head_size, key.shape[3], value.shape[3])
        self.products.append(heads * (key.shape[3] + value.shape[3]))

    def observe_cache(self, heads: int) -> None:
        """Observe layers with their own attention code, by their cache stores."""
        for row in self.cache.rows:
            if row.keys is not None and row.values is not None:
                self._note(heads, row.keys, row.values)


def measure_rows(skeleton: Any, wraps: int = 0) -> CacheRows:
    """Measure the sizes of a model, without weights.

    Args:
        skeleton: Model on the meta device.
        wraps: Length of the tuples that its layers return. Default 0: they return no tuples.

    Raises:
        UnsupportedModelError: The model cannot be measured.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attend)
    cache = TreeCache(_SLOTS * len(skeleton.layers), _ROWS)
    seen = _Seen(cache)
    siblings = torch.eye(_ROWS, dtype=torch.bool)
    context = TreeContext(0, torch.zeros(_ROWS, dtype=torch.long), 0, siblings, end=_ROWS)
    ours = not skeleton.own_attention
    given: dict[str, Any] = {"tree": seen} if ours else {}
    if ours and skeleton.masked:
        given["attention_mask"] = torch.ones(1, 1, _ROWS, _ROWS, dtype=torch.bool)
    try:
        with (
            torch.no_grad(),
            implementation(skeleton.model, **({"attention": _NAME} if ours else {})),
            _ending_at_attention(skeleton.layers, wraps) if ours else nullcontext(),
            monkeypatched(skeleton.functions),
            pass_context(context),
            _WithoutWeights(),
        ):
            skeleton.decoder(
                input_ids=torch.ones(1, _ROWS, dtype=torch.long),
                position_ids=torch.arange(_ROWS)[None],
                use_cache=True,
                **{skeleton.cache_keyword: cache},
                **given,
            )
        if skeleton.own_attention:
            seen.observe_cache(int(skeleton.config.num_attention_heads))
    except Exception as error:  # model code may fail in any way without weights
        reason = f"its cache size per token cannot be measured ({error}".splitlines()[0]
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
    """Observe query [1, H, T, D], key [1, KV, S, D] and value [1, KV, S, E], then end the layer."""
    assert tree is not None
    tree.observe(query, key, value)
    raise _AttentionError(indices)


@contextmanager
def _ending_at_attention(layers: Any, wraps: int) -> Iterator[None]:
    """Make layers return their input as soon as their attention is called."""

    def end(forward: Callable[..., Any], hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        try:
            return forward(hidden, *args, **kwargs)
        except _AttentionError as ended:
            nothing = [None] * (wraps - 1)
            return (hidden, *[ended.indices, *nothing][: wraps - 1]) if wraps else hidden

    with ExitStack() as stack:
        for layer in layers:
            stack.callback(wrap(layer, end))
        yield


class _WithoutWeights(TorchFunctionMode):
    """Mode that computes with zeros in place of meta parameters, and skips large products.

    Computing on the meta device would make torch import its compiler, which takes a second and much memory.
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
    """Replace meta tensors in a value with zeros that share one element and so take no memory."""
    if isinstance(value, torch.Tensor) and value.is_meta:
        return torch.zeros((), dtype=value.dtype).expand(value.shape)
    return type(value)(map(_zeros, value)) if type(value) in (list, tuple) else value


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
