"""Weights in 8-bit floats with a scale per block: fine-grained FP8 (DeepSeek-V3, arXiv 2412.19437).

`X.weight` float8_e4m3 [out, in] and `X.weight_scale_inv` [out / 128, in / 128], sizes rounded up. Despite its
name the scale is a multiplier. Experts may be in one tensor, `X` [experts, out, in] and `X_scale_inv`.
Without blocks there is one scale for the whole weight, which other tools call `X.weight_scale`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from offspec.checkpoint.quantized.common import (
    BLOCK_UNIT,
    FoundWeight,
    Tensors,
    bad_setting,
    packed_weight,
    require_tensor,
)
from offspec.checkpoint.tensors import TensorInfo, torch_dtype

if TYPE_CHECKING:
    from offspec_kernels.dequant import Format

_SCALES = (".weight_scale_inv", ".weight_scale")


def find(settings: Mapping[str, Any], tensors: Tensors) -> Iterator[FoundWeight]:
    """Yield each weight with a scale. Inputs, which GPUs with FP8 units quantize too, are not quantized."""
    block = _block(settings.get("weight_block_size"))
    for name, scale in tensors.items():
        for ending in _SCALES:
            if name.endswith(ending):
                yield _weight(f"{name.removesuffix(ending)}.weight", scale, block, tensors)
        fused = name.removesuffix("_scale_inv")
        if fused != name and fused in tensors and not fused.endswith(".weight"):
            yield _weight(fused, scale, block, tensors)


def default_formats(settings: Mapping[str, Any]) -> tuple[Format, ...]:
    """Return `QuantMethod.default_formats`; by rows if a matrix does not have whole blocks."""
    from offspec_kernels.dequant.float8 import Float8
    from offspec_kernels.errors import ArgumentError

    block, by_rows = settings.get("weight_block_size"), Float8(None, "channel")
    try:
        return (Float8((block[0], block[1]), "block", rounded=False), by_rows) if block else (by_rows,)
    except (ArgumentError, TypeError, IndexError, KeyError):  # invalid block sizes
        return (by_rows,)


def _block(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or any(type(size) is not int for size in value):
        bad_setting("weight_block_size", value)
    if min(value) <= 0 or any(size % BLOCK_UNIT for size in value):
        bad_setting("weight_block_size", value)
    return value[0], value[1]


def _weight(name: str, scale: TensorInfo, block: tuple[int, int] | None, tensors: Tensors) -> FoundWeight:
    from offspec_kernels.dequant.float8 import Float8

    parts = {"weight": require_tensor(tensors, name), "scale": scale}
    whole = block is None or scale.shape in ((), (1,))
    per: Literal["tensor", "block"] = "tensor" if whole else "block"
    make = partial(Float8, None if whole else block, per, torch_dtype(scale.dtype), rounded=False)
    return packed_weight(name, parts["weight"].shape, make, parts)
