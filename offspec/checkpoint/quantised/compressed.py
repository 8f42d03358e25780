"""Weights as compressed-tensors stores them, which llm-compressor writes and vLLM reads.

"pack-quantized": `X.weight_packed` int32 and `X.weight_shape`; "int-quantized", "float-quantized" and
"naive-quantized": `X.weight`, int8 or float8_e4m3; "nvfp4-pack-quantized": `X.weight_packed` uint8 and
`X.weight_global_scale`, which scales are divided by. With each `X.weight_scale`, where rounding is asymmetric
`X.weight_zero_point`, and `X.weight_g_idx` where groups follow the order of importance.

A scheme may ask that inputs be rounded too, as GPUs with 8-bit units do (W8A8): the weights are what is
unpacked here, and inputs keep all their bits.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal, cast

from offspec.checkpoint.quantised.parts import (
    INSTEAD,
    Found,
    Tensors,
    bad_tensor,
    need,
    order_of,
    packed_weight,
    pairs_of_bytes,
    read_bytes,
    read_integers,
)
from offspec.checkpoint.quantised.schemes import Scheme, scheme_of, schemes_of
from offspec.checkpoint.tensors import TensorInfo, torch_dtype

Per = Literal["tensor", "channel", "block"]
_MOST_ZEROS = 2**28  # bytes


def find(settings: Mapping[str, Any], tensors: Tensors) -> Iterator[Found]:
    """Every weight with a scale. Raises UnsupportedModelError for sparse and other formats, by name."""
    schemes = schemes_of(settings)
    for name in tensors:
        if name.endswith(".weight_scale"):
            module = name.removesuffix(".weight_scale")
            yield _weight(module, scheme_of(module, schemes), tensors)


def _weight(module: str, scheme: Scheme, tensors: Tensors) -> Found:
    packed, zeros = (tensors.get(f"{module}.weight_{name}") for name in ("packed", "zero_point"))
    if scheme.symmetric and zeros:
        _check_none(zeros, packed is not None)
    if packed and packed.dtype == "U8":
        made = _float4(module, packed, scheme, tensors)
    elif packed:
        shape = _shape(need(tensors, f"{module}.weight_shape"))
        made = _integers(module, packed, shape, scheme, tensors)
    else:
        stored = need(tensors, f"{module}.weight")
        if stored.dtype == "F8_E4M3":
            made = _floats(module, stored, scheme, tensors)
        elif stored.dtype == "I8":
            made = _integers(module, stored, stored.shape, scheme, tensors)
        else:
            bad_tensor(stored, f"is {stored.dtype} beside a scale, which is none of the forms that are read")
    beside = {f"{module}.weight_{name}" for name in ("shape", "g_idx", "zero_point")}
    return Found(made.weight, made.spent | beside)


def _check_none(zeros: TensorInfo, packed: bool) -> None:
    """Some write zero points of 0 for a symmetric weight too; any other would be passed over."""
    # In words the codes of a zero point are counted from the lowest, so that none of them is 0.
    data = b"" if packed and zeros.dtype == "I32" else read_bytes(zeros, _MOST_ZEROS)
    if not data or data.count(0) != len(data):
        bad_tensor(zeros, "is a zero point, and config.json calls the weight symmetric", INSTEAD)


def _integers(
    module: str, stored: TensorInfo, shape: tuple[int, ...], scheme: Scheme, tensors: Tensors
) -> Found:
    from offspec_kernels.dequant.compressed import CompressedInt

    scale = tensors[f"{module}.weight_scale"]
    if scheme.floats or scheme.strategy in ("block", "tensor_group"):
        bad_tensor(stored, f"holds integers, and config.json speaks of {scheme.strategy} of floats")
    parts = {"weight": stored, "scale": scale}
    if not scheme.symmetric:
        parts["zero_point"] = need(tensors, f"{module}.weight_zero_point")
    index = tensors.get(f"{module}.weight_g_idx")
    if scheme.ordered and scheme.strategy == "group" and scheme.group < shape[-1]:
        index = need(tensors, f"{module}.weight_g_idx")
    if index and scheme.strategy == "group" and _ordered(index, shape, scheme.group):
        parts["g_idx"] = index
    group = {"tensor": 0, "channel": None}.get(scheme.strategy, scheme.group)
    packed, dtype = stored.name.endswith("_packed"), torch_dtype(scale.dtype)
    make = partial(CompressedInt, scheme.bits, packed, group, not scheme.symmetric, "g_idx" in parts, dtype)
    return packed_weight(f"{module}.weight", shape, make, parts)


def _ordered(index: TensorInfo, shape: tuple[int, ...], group: int) -> bool:
    if index.shape != shape[-1:]:
        bad_tensor(index, f"must have {shape[-1:]} numbers, not {list(index.shape)}")
    if (read_integers(index, most=2**24) == -1).all():  # as the library fills what it has no order for
        return False
    return order_of(index, group)


def _floats(module: str, stored: TensorInfo, scheme: Scheme, tensors: Tensors) -> Found:
    from offspec_kernels.dequant.float8 import Float8

    scale, per = tensors[f"{module}.weight_scale"], scheme.strategy
    if not scheme.floats or scheme.bits != 8 or not scheme.symmetric or per in ("group", "tensor_group"):
        bad_tensor(
            stored, f"holds 8-bit floats, and config.json speaks of {scheme.bits} bits by {scheme.strategy}"
        )
    make = partial(Float8, scheme.block, cast("Per", per), torch_dtype(scale.dtype))
    return packed_weight(f"{module}.weight", stored.shape, make, {"weight": stored, "scale": scale})


def _float4(module: str, stored: TensorInfo, scheme: Scheme, tensors: Tensors) -> Found:
    import torch

    from offspec_kernels.dequant.float4 import Nvfp4

    if not scheme.floats or scheme.bits != 4 or scheme.strategy != "tensor_group" or not scheme.symmetric:
        bad_tensor(
            stored, f"holds 4-bit floats, and config.json speaks of {scheme.bits} bits by {scheme.strategy}"
        )
    scale, whole = (need(tensors, f"{module}.weight_{name}") for name in ("scale", "global_scale"))
    make = partial(Nvfp4, divided=True, dtype=torch.bfloat16)
    parts = {"weight": stored, "scale": scale, "global_scale": whole}
    return packed_weight(f"{module}.weight", pairs_of_bytes(stored), make, parts)


def _shape(described: TensorInfo) -> tuple[int, ...]:
    """The weight's dimensions, which the packed tensor has lost."""
    shape = tuple(int(size) for size in read_integers(described, most=4))
    if len(shape) < 2 or not all(0 < size < 2**31 for size in shape):
        bad_tensor(described, f"gives {list(shape)} as a weight's shape")
    return shape
