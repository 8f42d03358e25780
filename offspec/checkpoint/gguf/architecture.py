"""Differences between architectures in how GGUF files store their models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from offspec.checkpoint.gguf.header import GgufHeader
from offspec.checkpoint.gguf.rope import ROPE_FACTORS, set_rope
from offspec.checkpoint.ranges import damaged


def _as_read(config: Any, header: GgufHeader) -> Any:
    return config


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """An architecture, by llama.cpp's name, and how its converter changes the model.

    Args:
        arch: Name in `general.architecture`, the prefix of its keys.
        configure: Makes the transformers configuration. Default None: transformers reads it.
        read_as: Architecture with equivalent keys that transformers reads it as. Default "": its own.
        unread: Part of the names of keys on which transformers' reader fails. Default "": none.
        keys: Keys that transformers leaves at their defaults, and the attributes they belong to.
        complete: Corrects the configuration that was read, or returns a new one.
        rope: Completes the configuration's rotary parameters. None: it has none.
        rope_tables: Tensors that belong to the configuration and are not weights.
        permuted: Whether rows of queries and keys alternate between the halves of a head.
        norms_plus_one: Whether 1 was added to the weights of norms.
        tiled_heads: Whether value heads are stored as R repetitions of all K, for K key heads.
        transposed_experts: Whether the model has rows and columns of its experts exchanged.
        has_module: Whether layers after the last may be a multi-token prediction module.
    """

    arch: str
    configure: Callable[[GgufHeader, GgufArchitecture], Any] | None = None
    read_as: str = ""
    unread: str = ""
    keys: Mapping[str, str] = field(default_factory=dict)
    complete: Callable[[Any, GgufHeader], Any] = _as_read
    rope: Callable[[Any, str, GgufHeader], None] | None = set_rope
    rope_tables: tuple[str, ...] = (ROPE_FACTORS,)
    permuted: bool = False
    norms_plus_one: bool = False
    tiled_heads: bool = False
    transposed_experts: bool = False
    has_module: bool = False

    def extra_layers(self, header: GgufHeader) -> int:
        """Return the number of layers of a multi-token prediction module. Raises HeaderError."""
        found = header.metadata.get(f"{self.arch}.nextn_predict_layers", 0) if self.has_module else 0
        if type(found) is not int or not 0 <= found < 2**15:
            damaged(header.path, f"invalid {self.arch}.nextn_predict_layers: {str(found)[:40]!r}")
        return found
