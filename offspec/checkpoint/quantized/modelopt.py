"""Weights of NVIDIA's Model Optimizer.

NVFP4: `X.weight` uint8 [out, in / 2], `X.weight_scale` float8_e4m3 [out, in / 16] and `X.weight_scale_2`
float32, the multiplier of scales. FP8: `X.weight` float8_e4m3 and one `X.weight_scale`.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from offspec.checkpoint.quantized.common import (
    INSTEAD,
    FoundWeight,
    Tensors,
    bad_tensor,
    packed_weight,
    pairs_of_bytes,
    require_tensor,
)
from offspec.checkpoint.tensors import TensorInfo, torch_dtype
from offspec.core.errors import UnsupportedModelError

_KNOWN = ("NVFP4", "FP8", "MIXED_PRECISION")
_SCALE = ".weight_scale"


def find(settings: Mapping[str, Any], tensors: Tensors) -> Iterator[FoundWeight]:
    """Yield each weight with a scale. Inputs, which GPUs quantize too, are not quantized.

    Raises UnsupportedModelError, naming it, for another algorithm.
    """
    algorithm = str(settings.get("quant_algo"))[:40]
    if algorithm not in _KNOWN:
        raise UnsupportedModelError(
            f"this checkpoint is quantized by Model Optimizer as {algorithm!r}, which is not supported "
            f"(only {', '.join(_KNOWN)} are): {INSTEAD}"
        )
    for name in tensors:
        if name.endswith("pre_quant_scale"):
            raise UnsupportedModelError(
                f"this checkpoint is quantized by Model Optimizer with scales for inputs ({name[:200]!r}), "
                f"which are not supported: {INSTEAD}"
            )
        if name.endswith(_SCALE):
            module = name.removesuffix(_SCALE)
            yield _weight(module, require_tensor(tensors, f"{module}.weight"), tensors)


def _weight(module: str, stored: TensorInfo, tensors: Tensors) -> FoundWeight:
    from offspec_kernels.dequant.float4 import Nvfp4
    from offspec_kernels.dequant.float8 import Float8

    name, scale = f"{module}.weight", tensors[f"{module}{_SCALE}"]
    if stored.dtype == "U8":
        parts = {"weight": stored, "scale": scale, "global_scale": require_tensor(tensors, f"{name}_scale_2")}
        return packed_weight(name, pairs_of_bytes(stored), Nvfp4, parts)
    if stored.dtype != "F8_E4M3":
        bad_tensor(stored, f"is {stored.dtype} with a scale, which is not supported")
    make = partial(Float8, None, "tensor", torch_dtype(scale.dtype), rounded=False)
    return packed_weight(name, stored.shape, make, {"weight": stored, "scale": scale})
