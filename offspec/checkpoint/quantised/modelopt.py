"""Weights as NVIDIA's Model Optimizer stores them.

NVFP4: `X.weight` uint8 [out, in / 2], `X.weight_scale` float8_e4m3 [out, in / 16] and `X.weight_scale_2`
float32, by which scales are multiplied. FP8: `X.weight` float8_e4m3 and one `X.weight_scale`.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from offspec.checkpoint.quantised.parts import (
    INSTEAD,
    Found,
    Tensors,
    bad_tensor,
    need,
    packed_weight,
    pairs_of_bytes,
)
from offspec.checkpoint.tensors import TensorInfo, torch_dtype
from offspec.core.errors import UnsupportedModelError

_KNOWN = ("NVFP4", "FP8", "MIXED_PRECISION")
_SCALE = ".weight_scale"


def find(settings: Mapping[str, Any], tensors: Tensors) -> Iterator[Found]:
    """Every weight with a scale; inputs, which GPUs would round as well, stay as they are.

    Raises UnsupportedModelError, by its name, for another algorithm.
    """
    algorithm = str(settings.get("quant_algo"))[:40]
    if algorithm not in _KNOWN:
        raise UnsupportedModelError(
            f"this checkpoint is quantised by Model Optimizer as {algorithm!r}, which is not read "
            f"({', '.join(_KNOWN)} are): {INSTEAD}"
        )
    for name in tensors:
        if name.endswith("pre_quant_scale"):
            raise UnsupportedModelError(
                f"this checkpoint is quantised by Model Optimizer with scales for inputs ({name[:200]!r}), "
                f"which are not read: {INSTEAD}"
            )
        if name.endswith(_SCALE):
            module = name.removesuffix(_SCALE)
            yield _weight(module, need(tensors, f"{module}.weight"), tensors)


def _weight(module: str, stored: TensorInfo, tensors: Tensors) -> Found:
    from offspec_kernels.dequant.float4 import Nvfp4
    from offspec_kernels.dequant.float8 import Float8

    name, scale = f"{module}.weight", tensors[f"{module}{_SCALE}"]
    if stored.dtype == "U8":
        parts = {"weight": stored, "scale": scale, "global_scale": need(tensors, f"{name}_scale_2")}
        return packed_weight(name, pairs_of_bytes(stored), Nvfp4, parts)
    if stored.dtype != "F8_E4M3":
        bad_tensor(stored, f"is {stored.dtype} beside a scale, which is none of the forms that are read")
    make = partial(Float8, None, "tensor", torch_dtype(scale.dtype), rounded=False)
    return packed_weight(name, stored.shape, make, {"weight": stored, "scale": scale})
