"""Supported quantization methods: one entry each, by its name in config.json.

The entries determine how a checkpoint is opened, which tensors are refused as unexplained codes, the methods
listed in errors, and the sizes that a plan assumes without a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offspec.checkpoint.pack_manifest import METHOD as PACK
from offspec.checkpoint.quantized import awq, bnb, compressed, fp8, gptq, modelopt, mxfp4, packs, schemes
from offspec.checkpoint.quantized.common import INSTEAD, FoundWeight, Tensors, uniform_formats
from offspec.core.errors import UnsupportedModelError

if TYPE_CHECKING:
    from offspec_kernels.dequant import Format


@dataclass(frozen=True, slots=True)
class QuantMethod:
    """A method of storing quantized weights.

    Args:
        find: Yields the weights, given a `quantization_config` and a checkpoint's tensors.
        default_formats: Returns formats of about the right size from the `quantization_config` alone; the
            first that fits a shape is used. Default: uniform steps.
        weight_suffixes: Endings of tensors that only quantized weights have.
        scales: Endings of scales, and of the tensors that they belong to. Inputs, outputs, keys and values
            have scales too (`X.k_scale`), which are ignored; with a tensor `X`, `X_scale` is a weight's.
        experts_only: Whether only routed experts are quantized, and everything else has 16 bits.
    """

    find: Callable[[Mapping[str, Any], Tensors], Iterable[FoundWeight]]
    default_formats: Callable[[Mapping[str, Any]], tuple[Format, ...]] = uniform_formats
    weight_suffixes: tuple[str, ...] = ()
    scales: tuple[tuple[str, str], ...] = ()
    experts_only: bool = False


METHODS = {
    "awq": QuantMethod(awq.find, weight_suffixes=(".qweight",)),
    "bitsandbytes": QuantMethod(
        bnb.find,
        lambda settings: uniform_formats({"bits": 4 if settings.get("load_in_4bit") else 8}),
        weight_suffixes=(".SCB", ".absmax"),
    ),
    "compressed-tensors": QuantMethod(
        compressed.find, schemes.default_formats, (".weight_packed", ".weight_scale"), (("_scale", ""),)
    ),
    "fp8": QuantMethod(fp8.find, fp8.default_formats, (".weight_scale_inv",), (("_scale_inv", ""),)),
    "gptq": QuantMethod(gptq.find, weight_suffixes=(".qweight",)),
    "modelopt": QuantMethod(modelopt.find, schemes.default_formats, (".weight_scale",), (("_scale", ""),)),
    "mxfp4": QuantMethod(
        mxfp4.find, mxfp4.default_formats, scales=(("_scales", "_blocks"),), experts_only=True
    ),
    PACK: QuantMethod(packs.find),
}
WEIGHT_SUFFIXES = tuple(sign for method in METHODS.values() for sign in method.weight_suffixes)
SCALES = {pair for method in METHODS.values() for pair in method.scales}


def name_of(settings: Mapping[str, Any]) -> str:
    """Return the method that a `quantization_config` names; "" if none."""
    name = settings.get("quant_method")
    if name is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        return "bitsandbytes"  # old spelling, from when it was the only method
    return str(name or "")


def method_of(settings: Mapping[str, Any]) -> QuantMethod:
    """Return the method of a `quantization_config`. Raises UnsupportedModelError for an unsupported one."""
    name = name_of(settings)
    if name not in METHODS:
        shown = (name or "an unnamed method")[:60]
        shown = shown if shown.isprintable() else ascii(shown)
        raise UnsupportedModelError(
            f"this checkpoint is quantized by {shown}, which is not supported "
            f"(only {', '.join(METHODS)} are): {INSTEAD}"
        )
    return METHODS[name]
