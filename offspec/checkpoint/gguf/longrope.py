"""Phi 3's rotary positions: of a part of each head, with two tables of factors for short and long texts."""

from __future__ import annotations

from typing import Any

from offspec.checkpoint.gguf.header import GgufHeader
from offspec.checkpoint.gguf.values import read_rows
from offspec.checkpoint.ranges import damaged
from offspec.core.errors import MissingTensorError

LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


def phi_rope(config: Any, header: GgufHeader) -> dict[str, Any]:
    """The rotary parameters that the file states, and that transformers' own reader passes over.

    Raises HeaderError for tables of another length than half of what is rotated, MissingTensorError for
    one of them alone.
    """
    size = config.hidden_size // config.num_attention_heads
    rotated = header.metadata.get("phi3.rope.dimension_count") or size
    found: dict[str, Any] = {"partial_rotary_factor": rotated / size}
    if LONG not in header.tensors and SHORT not in header.tensors:
        return found
    get = header.metadata.get
    original = get("phi3.rope.scaling.original_context_length") or config.max_position_embeddings
    config.original_max_position_embeddings = original
    if (size_factor := get("phi3.rope.scaling.attn_factor")) is not None:
        found["attention_factor"] = size_factor
    return {
        **found,
        "rope_type": "longrope",
        "factor": config.max_position_embeddings / original,
        "original_max_position_embeddings": original,
        "long_factor": _table(header, LONG, rotated // 2),
        "short_factor": _table(header, SHORT, rotated // 2),
    }


def _table(header: GgufHeader, name: str, length: int) -> list[float]:
    if name not in header.tensors:
        raise MissingTensorError(f"{header.path} has nothing for the tensor {name}; download it again")
    values = read_rows(header.tensors[name], 0, 1)[0]
    if values.size != length:
        damaged(header.path, f"tensor {name} has {values.size} factors for {length} frequencies")
    return [float(value) for value in values]
