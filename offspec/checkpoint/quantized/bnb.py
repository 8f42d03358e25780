"""bitsandbytes weights with 4 bits (QLoRA, arXiv 2305.14314) or in int8 (arXiv 2208.07339).

4 bits: `X.weight` holds the codes, `X.weight.absmax` a scale for each block, `X.weight.quant_map` the 16
values and `X.weight.quant_state.bitsandbytes__nf4` (or fp4) a JSON text with the rest. If scales are
quantized too, they are described by `X.weight.nested_absmax` and `X.weight.nested_quant_map`.

int8: `X.weight`, and `X.SCB` with a scale for each row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from offspec.checkpoint.quantized.common import (
    INSTEAD,
    FoundWeight,
    Tensors,
    bad_tensor,
    packed_weight,
    read_bytes,
    require_tensor,
)
from offspec.checkpoint.ranges import one_line
from offspec.checkpoint.tensors import TensorInfo, torch_dtype
from offspec.core.errors import UnsupportedModelError

if TYPE_CHECKING:
    import torch

_STATE = ".quant_state.bitsandbytes__"
_MOST_JSON = 2**16
_DTYPES = ("float32", "float16", "bfloat16")


def find(settings: Mapping[str, Any], tensors: Tensors) -> Iterator[FoundWeight]:
    """Yield the weights of both kinds. Inputs, which bitsandbytes' int8 quantizes too, are not."""
    for name in tensors:
        weight, state, kind = name.partition(_STATE)
        if state:
            yield _four_bits(weight, kind, tensors)
        elif name.endswith(".SCB"):
            yield _int8(name.removesuffix(".SCB"), tensors)


def _four_bits(weight: str, kind: str, tensors: Tensors) -> FoundWeight:
    from offspec_kernels.dequant.codebook import Codebook

    described = tensors[f"{weight}{_STATE}{kind}"]
    state = _read_state(described, kind)
    codes = require_tensor(tensors, weight)
    if codes.dtype != "U8":  # stored as wider integers so that they can be sharded; the bytes are the same
        codes = replace(codes, dtype="U8", shape=(codes.nbytes,))
    parts = {"codes": codes, "absmax": require_tensor(tensors, f"{weight}.absmax")}
    parts["table"] = require_tensor(tensors, f"{weight}.quant_map")
    nested, offset = 0, 0.0
    if "nested_blocksize" in state or f"{weight}.nested_absmax" in tensors:
        nested = _size(described, state.get("nested_blocksize"))
        offset = _number(described, state.get("nested_offset"))
        parts["nested_absmax"] = require_tensor(tensors, f"{weight}.nested_absmax")
        parts["nested_table"] = require_tensor(tensors, f"{weight}.nested_quant_map")
    block, dtype = _size(described, state.get("blocksize")), _dtype(described, state.get("dtype"))
    absmax = torch_dtype(parts["absmax"].dtype)
    make = partial(Codebook, cast("Literal['nf4', 'fp4']", kind), block, absmax, nested, offset, dtype)
    shape = _shape(described, state.get("shape"))
    found = packed_weight(weight, shape, make, parts, (weight, described.name))
    _check_table(parts["table"], kind)
    return found


def _read_state(described: TensorInfo, kind: str) -> dict[str, Any]:
    """Return the JSON text that bitsandbytes stores in a tensor of bytes."""
    if kind not in ("nf4", "fp4"):
        raise UnsupportedModelError(
            f"{described.file}: the weight of {described.name[:200]!r} is in {kind[:20]!r}; only nf4 and "
            f"fp4 are supported: {INSTEAD}"
        )
    try:
        state = json.loads(read_bytes(described, _MOST_JSON))
    except (ValueError, RecursionError) as error:
        bad_tensor(described, f"is not JSON ({one_line(error)})")
    if not isinstance(state, dict) or state.get("quant_type") != kind:
        bad_tensor(described, f"does not describe a weight in {kind}")
    return state


def _check_table(table: TensorInfo, kind: str) -> None:
    """Raise unless the file's values are those of its kind: they are used, and others would be wrong."""
    import numpy as np

    from offspec_kernels.dequant.codebook.tables import TABLES

    found = np.frombuffer(read_bytes(table, 64), "<f4")
    if not np.allclose(found, TABLES[kind], rtol=0, atol=1e-6):
        bad_tensor(table, f"does not hold the values of {kind}")


def _size(described: TensorInfo, value: object) -> int:
    if type(value) is not int or not 0 < value < 2**31:
        bad_tensor(described, f"gives a size as {str(value)[:40]!r}")
    return value


def _number(described: TensorInfo, value: object) -> float:
    if type(value) not in (int, float) or not math.isfinite(float(str(value))):
        bad_tensor(described, f"gives a number as {str(value)[:40]!r}")
    return float(str(value))


def _shape(described: TensorInfo, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) != 2:
        bad_tensor(described, f"gives {str(value)[:40]!r} as the weight's shape")
    return tuple(_size(described, size) for size in value)


def _dtype(described: TensorInfo, value: object) -> torch.dtype | None:
    """Return the dtype in which the library dequantizes before any conversion; None for float32."""
    import torch

    if value not in _DTYPES:
        bad_tensor(described, f"gives {str(value)[:40]!r} as the weight's dtype")
    dtype: torch.dtype = getattr(torch, str(value))
    return None if dtype == torch.float32 else dtype


def _int8(module: str, tensors: Tensors) -> FoundWeight:
    from offspec_kernels.dequant.int8rows import Int8Rows

    parts = {"codes": require_tensor(tensors, f"{module}.weight"), "scale": tensors[f"{module}.SCB"]}
    order = tensors.get(f"{module}.weight_format")
    if order and (order.nbytes != 1 or read_bytes(order, 1) != b"\0"):
        raise UnsupportedModelError(
            f"{order.file}: the weight of {module[:200]!r} is stored in the layout of one kind of GPU, "
            f"which is not supported: {INSTEAD}"
        )
    others = [order.name] if order else []
    return packed_weight(f"{module}.weight", parts["codes"].shape, Int8Rows, parts, others)
