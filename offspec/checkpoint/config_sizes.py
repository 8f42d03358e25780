"""Validation of config.json sizes against the checkpoint's tensor shapes, before anything is allocated.

A configuration of a billion layers would otherwise build a billion names before the first missing weight is
noticed.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from offspec.checkpoint.tensors import Weight, stored_tensors
from offspec.core.errors import HeaderError

_LAYERS = re.compile(r"(num|n)_(\w+_)?layers?|depth", re.ASCII)
_SIZES = re.compile(
    r"(\w+_)?(num|n)_(?!positions|ctx)\w+|(?!.*(window|chunk|max|token))(\w+_)?(size|dim|rank|width|embd|inner)|head_dim",
    re.ASCII,
)
# In every model the value of these fields is a size: an integer of at least zero.
_WHOLE = {
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("vocab_size", "n_embd", "n_layer", "n_head"),
}
_MOST_LAYERS = 1024  # minimum limit on layers: tensors of some parts are not in this checkpoint
_LABELS = 2**20  # a list of names is made of them
# Packed rows are up to 16 times shorter than a matrix's, and sizes of absent parts may be larger.
_PACKED, _LEAST = 16, 2**16
_ALONE = 2**24  # limit without tensors to compare with


def check_sizes(config: Mapping[str, Any], weights: Collection[Weight], place: str) -> None:
    """Raise HeaderError for a size that is impossible with the shapes of these tensors.

    Args:
        config: The configuration.
        weights: The model's weights; empty if only its configuration is known.
        place: Name of the configuration in the error.
    """
    stored = [info for weight in weights for info in stored_tensors(weight)]
    shapes = {info.shape for info in stored} | {weight.shape for weight in weights}
    longest = max((size for shape in shapes for size in shape), default=0)
    most = max(_LEAST, _PACKED * longest) if stored else _ALONE
    for name, value in _named(config):
        limit = most
        if _LAYERS.fullmatch(name):
            limit = max(_MOST_LAYERS, len(weights))
        elif name == "num_labels":
            limit = min(most, _LABELS)
        elif not _SIZES.fullmatch(name):
            continue
        if name in _WHOLE and value is not None and not _is_size(value):
            raise HeaderError(f"{place} has {name} {str(value)[:40]!r}, not a size; download it again")
        if any(isinstance(size, int | float) and size > limit for size in _numbers(value)):
            raise HeaderError(
                f"{place} has {name} {str(value)[:40]}, but no tensors of that size; download it again"
            )


def _is_size(value: Any) -> bool:
    """Return whether the value is a number of at least zero, or a list of these (one per layer)."""
    return all(
        (isinstance(size, int) and not isinstance(size, bool) and size >= 0) or size is None
        for size in _numbers(value)
    )


def _numbers(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _named(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield names and values of a configuration and of its nested text, image and other configurations."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            if name != "quantization_config":
                yield from _named(value)
        else:
            yield name, value
