"""compressed-tensors weights, as llm-compressor writes and vLLM reads them.

"pack-quantized": `X.weight_packed` int32 and `X.weight_shape`; "int-quantized", "float-quantized" and
"naive-quantized": `X.weight`, int8 or float8_e4m3; "nvfp4-pack-quantized": `X.weight_packed` uint8 and
`X.weight_global_scale`, the divisor of scales. Each has `X.weight_scale`, an asymmetric one
`X.weight_zero_point`, and `X.weight_g_idx` if groups are sorted by importance.

A scheme may also quantize inputs, as GPUs with 8-bit units do (W8A8). Only weights are quantized here; inputs
keep all their bits.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal, cast

from offspec.checkpoint.quantized.common import (
    INSTEAD,
    FoundWeight,
    Tensors,
    bad_tensor,
    has_act_order,
    packed_weight,
    pairs_of_bytes,
    read_bytes,
    read_integers,
    require_tensor,
)
from offspec.checkpoint.quantized.schemes import Scheme, scheme_of, schemes_of
from offspec.checkpoint.tensors import TensorInfo, torch_dtype

Per = Literal["tensor", "channel", "block"]
_MOST_ZEROS = 2**28  # bytes


def find(settings: Mapping[str, Any], tensors: Tensors) -> Iterator[FoundWeight]:
    """Yield each weight with a scale. Raises UnsupportedModelError, naming it, for an unsupported format."""
    schemes = schemes_of(settings)
    for name in tensors:
        if name.endswith(".weight_scale"):
            module = name.removesuffix(".weight_scale")
            yield _weight(module, scheme_of(module, schemes), tensors)


def _weight(module: str, scheme: Scheme, tensors: Tensors) -> FoundWeight:
    packed, zeros = (tensors.get(f"{module}.weight_{name}") for name in ("packed", "zero_point"))
    if scheme.symmetric and zeros:
        _check_none(zeros, packed is not None)
    if packed and packed.dtype == "U8":
        made = _float4(module, packed, scheme, tensors)
    elif packed:
        shape = _shape(require_tensor(tensors, f"{module}.weight_shape"))
        made = _integers(module, packed, shape, scheme, tensors)
    else:
        stored = require_tensor(tensors, f"{module}.weight")
        if stored.dtype == "F8_E4M3":
            made = _floats(module, stored, scheme, tensors)
        elif stored.dtype == "I8":
            made = _integers(module, stored, stored.shape, scheme, tensors)
        else:
            bad_tensor(stored, f"is {stored.dtype} with a scale, which is not supported")
    described = {f"{module}.weight_{name}" for name in ("shape", "g_idx", "zero_point")}
    return FoundWeight(made.weight, made.consumed | described)


def _check_none(zeros: TensorInfo, packed: bool) -> None:
    """Raise for nonzero zero points of a symmetric weight, which would be ignored; zeros are allowed."""
    # In packed integers, codes of a zero point are counted from the lowest, so none of them is 0.
    data = b"" if packed and zeros.dtype == "I32" else read_bytes(zeros, _MOST_ZEROS)
    if not data or data.count(0) != len(data):
        bad_tensor(zeros, "is a nonzero zero point, but config.json calls the weight symmetric", INSTEAD)


def _integers(
    module: str, stored: TensorInfo, shape: tuple[int, ...], scheme: Scheme, tensors: Tensors
) -> FoundWeight:
    from offspec_kernels.dequant.compressed import CompressedInt

    scale = tensors[f"{module}.weight_scale"]
    if scheme.floats or scheme.strategy in ("block", "tensor_group"):
        bad_tensor(stored, f"holds integers, but config.json specifies {scheme.strategy} of floats")
    parts = {"weight": stored, "scale": scale}
    if not scheme.symmetric:
        parts["zero_point"] = require_tensor(tensors, f"{module}.weight_zero_point")
    index = tensors.get(f"{module}.weight_g_idx")
    if scheme.act_order and scheme.strategy == "group" and scheme.group < shape[-1]:
        index = require_tensor(tensors, f"{module}.weight_g_idx")
    if index and scheme.strategy == "group" and _ordered(index, shape, scheme.group):
        parts["g_idx"] = index
    group = {"tensor": 0, "channel": None}.get(scheme.strategy, scheme.group)
    packed, dtype = stored.name.endswith("_packed"), torch_dtype(scale.dtype)
    make = partial(CompressedInt, scheme.bits, packed, group, not scheme.symmetric, "g_idx" in parts, dtype)
    return packed_weight(f"{module}.weight", shape, make, parts)


def _ordered(index: TensorInfo, shape: tuple[int, ...], group: int) -> bool:
    if index.shape != shape[-1:]:
        bad_tensor(index, f"must have {shape[-1:]} numbers, not {list(index.shape)}")
    if (read_integers(index, most=2**24) == -1).all():  # the library's filler for an unused order
        return False
    return has_act_order(index, group)


def _floats(module: str, stored: TensorInfo, scheme: Scheme, tensors: Tensors) -> FoundWeight:
    from offspec_kernels.dequant.float8 import Float8

    scale, per = tensors[f"{module}.weight_scale"], scheme.strategy
    if not scheme.floats or scheme.bits != 8 or not scheme.symmetric or per in ("group", "tensor_group"):
        bad_tensor(
            stored, f"holds 8-bit floats, but config.json specifies {scheme.bits} bits by {scheme.strategy}"
        )
    make = partial(Float8, scheme.block, cast("Per", per), torch_dtype(scale.dtype))
    return packed_weight(f"{module}.weight", stored.shape, make, {"weight": stored, "scale": scale})


def _float4(module: str, stored: TensorInfo, scheme: Scheme, tensors: Tensors) -> FoundWeight:
    import torch

    from offspec_kernels.dequant.float4 import Nvfp4

    if not scheme.floats or scheme.bits != 4 or scheme.strategy != "tensor_group" or not scheme.symmetric:
        bad_tensor(
            stored, f"holds 4-bit floats, but config.json specifies {scheme.bits} bits by {scheme.strategy}"
        )
    scale, whole = (require_tensor(tensors, f"{module}.weight_{name}") for name in ("scale", "global_scale"))
    make = partial(Nvfp4, divided=True, dtype=torch.bfloat16)
    parts = {"weight": stored, "scale": scale, "global_scale": whole}
    return packed_weight(f"{module}.weight", pairs_of_bytes(stored), make, parts)


def _shape(described: TensorInfo) -> tuple[int, ...]:
    """Return the weight's dimensions, which the packed tensor does not have."""
    shape = tuple(int(size) for size in read_integers(described, most=4))
    if len(shape) < 2 or not all(0 < size < 2**31 for size in shape):
        bad_tensor(described, f"gives {list(shape)} as a weight's shape")
    return shape
