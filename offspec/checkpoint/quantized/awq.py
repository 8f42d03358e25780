"""AWQ weights with 4 bits (arXiv 2306.00978), in the layout of AutoAWQ's "gemm" version.

`X.qweight` int32 [in, out / 8], `X.qzeros` int32 [in / group, out / 8], `X.scales` [in / group, out].
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from offspec.checkpoint.quantized.common import (
    INSTEAD,
    FoundWeight,
    Tensors,
    matrix_shape,
    packed_weight,
    require_tensor,
    setting,
)
from offspec.checkpoint.tensors import torch_dtype
from offspec.core.errors import UnsupportedModelError

_DIVIDED = (".act.scales", ".gelu_impl.scales")  # AutoAWQ's divisors of activations


def find(settings: Mapping[str, Any], tensors: Tensors) -> Iterator[FoundWeight]:
    """Yield each weight with a `qweight`. Raises UnsupportedModelError for versions other than gemm."""
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    bits = setting(settings, "bits", "w_bit", usual=4)
    if version != "gemm" or bits != 4 or settings.get("zero_point") is False:
        form = f"version {version[:40]!r}, {bits} bits"
        if settings.get("zero_point") is False:
            form += ", without zero points"
        raise UnsupportedModelError(
            f"this checkpoint uses an unsupported variant of AWQ ({form}; only gemm with 4 bits "
            f"and zero points is supported): {INSTEAD}"
        )
    group = setting(settings, "group_size", "q_group_size", usual=128)
    for name in tensors:
        if name.endswith(_DIVIDED):
            raise UnsupportedModelError(
                f"this checkpoint is quantized by AWQ with scales for the output of an activation function "
                f"({name[:200]!r}), which are not supported: {INSTEAD}"
            )
        if name.endswith(".qweight"):
            yield _weight(name.removesuffix(".qweight"), group, tensors)


def _weight(module: str, group: int, tensors: Tensors) -> FoundWeight:
    from offspec_kernels.dequant.awq import Awq

    parts = {part: require_tensor(tensors, f"{module}.{part}") for part in ("qweight", "qzeros", "scales")}
    inputs, words = matrix_shape(parts["qweight"])
    make = partial(Awq, inputs if group == -1 else group, torch_dtype(parts["scales"].dtype))
    return packed_weight(f"{module}.weight", (words * 8, inputs), make, parts)
