"""Experts in MXFP4 (Open Compute Project, Microscaling Formats 1.0), in the layout of gpt-oss.

`X_blocks` uint8 [experts, rows, groups, 16] and `X_scales` uint8 [experts, rows, groups] encode the parameter
X [experts, columns, rows]; a group has 32 columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from offspec.checkpoint.quantized.common import (
    FoundWeight,
    Tensors,
    bad_tensor,
    packed_weight,
    require_tensor,
)

if TYPE_CHECKING:
    from offspec_kernels.dequant import Format

_BLOCKS = "_blocks"


def find(settings: Mapping[str, Any], tensors: Tensors) -> Iterator[FoundWeight]:
    """Yield each weight with blocks. Settings are ignored: the tensors show which modules are quantized."""
    from offspec_kernels.dequant.float4 import Mxfp4

    for name, blocks in tensors.items():
        if not name.endswith(_BLOCKS):
            continue
        weight = name.removesuffix(_BLOCKS)
        parts = {"blocks": blocks, "scales": require_tensor(tensors, f"{weight}_scales")}
        if len(blocks.shape) < 3:
            bad_tensor(blocks, f"must be [..., rows, groups, 16], not {list(blocks.shape)}")
        *experts, rows, groups, _ = blocks.shape
        yield packed_weight(weight, (*experts, groups * Mxfp4.block, rows), Mxfp4, parts)


def default_formats(settings: Mapping[str, Any]) -> tuple[Format, ...]:
    from offspec_kernels.dequant.float4 import Mxfp4

    return (Mxfp4(),)
