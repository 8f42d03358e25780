"""Weights in AWQ's 4 bits (arXiv 2306.00978), as AutoAWQ's "gemm" version stores them.

`X.qweight` int32 [in, out / 8], `X.qzeros` int32 [in / group, out / 8], `X.scales` [in / group, out].
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
    setting,
)
from offspec.checkpoint.tensors import torch_dtype
from offspec.core.errors import UnsupportedModelError

_DIVIDED = (".act.scales", ".gelu_impl.scales")  # where AutoAWQ keeps what it divides activations by


def find(settings: Mapping[str, Any], tensors: Tensors) -> Iterator[Found]:
    """Every weight with a `qweight`. Raises UnsupportedModelError for other versions than gemm."""
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    bits = setting(settings, "bits", "w_bit", usual=4)
    if version != "gemm" or bits != 4 or settings.get("zero_point") is False:
        form = f"version {version[:40]!r}, {bits} bits"
        if settings.get("zero_point") is False:
            form += ", without zero points"
        raise UnsupportedModelError(
            f"this checkpoint is quantised by AWQ in a form that is not read ({form}; only gemm with 4 bits "
            f"and zero points is): {INSTEAD}"
        )
    group = setting(settings, "group_size", "q_group_size", usual=128)
    for name in tensors:
        if name.endswith(_DIVIDED):
            raise UnsupportedModelError(
                f"this checkpoint is quantised by AWQ with scales for what an activation function puts out "
                f"({name[:200]!r}), which are not read: {INSTEAD}"
            )
        if name.endswith(".qweight"):
            yield _weight(name.removesuffix(".qweight"), group, tensors)


def _weight(module: str, group: int, tensors: Tensors) -> Found:
    from offspec_kernels.dequant.awq import Awq

    parts = {part: need(tensors, f"{module}.{part}") for part in ("qweight", "qzeros", "scales")}
    qweight, scales = parts["qweight"], parts["scales"]
    if len(qweight.shape) != 2:
        bad_tensor(qweight, f"must have two dimensions, not {list(qweight.shape)}")
    inputs, outputs = qweight.shape[0], qweight.shape[1] * 8
    make = partial(Awq, inputs if group == -1 else group, torch_dtype(scales.dtype))
    return packed_weight(f"{module}.weight", (outputs, inputs), make, parts)
