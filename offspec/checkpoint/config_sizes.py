"""Sizes in config.json, compared with the tensors they are of before anything is made of those sizes.

A model of a billion layers is a list of a billion names before the first of its weights is missed.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from offspec.checkpoint.tensors import Weight, on_disk
from offspec.core.errors import HeaderError

_LAYERS = re.compile(r"(num|n)_(\w+_)?layers?|depth", re.ASCII)
_SIZES = re.compile(
    r"(\w+_)?(num|n)_(?!positions|ctx)\w+|(?!.*(window|chunk|max|token))(\w+_)?(size|dim|rank|width|embd|inner)|head_dim",
    re.ASCII,
)
# What every model has under these names is a size: neither a text, nor below nought.
_WHOLE = {
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("vocab_size", "n_embd", "n_layer", "n_head"),
}
_MOST_LAYERS = 1024  # where fewer tensors do not say otherwise: of a part whose tensors are elsewhere
_LABELS = 2**20  # each has a name
# Packed rows are up to 16 times shorter than a matrix's, and sizes of parts that are not here may be larger.
_PACKED, _LEAST = 16, 2**16
_ALONE = 2**24  # without tensors to compare with


def check_sizes(config: Mapping[str, Any], weights: Collection[Weight], place: str) -> None:
    """Raise HeaderError for a size that tensors of these shapes cannot have; place: of the configuration.

    weights: those of the model; none where only its configuration is known.
    """
    stored = [info for weight in weights for info in on_disk(weight)]
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
            raise HeaderError(f"{place} has {name} {str(value)[:40]!r}, which is no size; download it again")
        if any(isinstance(size, int | float) and size > limit for size in _numbers(value)):
            raise HeaderError(
                f"{place} has {name} {str(value)[:40]}, and no tensors of such a size; download it again"
            )


def _is_size(value: Any) -> bool:
    """A number of at least nought, or one for each layer."""
    return all(
        (isinstance(size, int) and not isinstance(size, bool) and size >= 0) or size is None
        for size in _numbers(value)
    )


def _numbers(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _named(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values of a configuration and of its parts for text, images and so on."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            if name != "quantization_config":
                yield from _named(value)
        else:
            yield name, value
