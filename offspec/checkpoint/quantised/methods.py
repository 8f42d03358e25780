"""The methods of quantisation whose checkpoints are read: an entry each, by the name that config.json has.

From the entries follow how a checkpoint is opened, which tensors are refused as codes that no method
explains, what errors list, and the sizes that a plan goes by without a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offspec.checkpoint.pack_manifest import METHOD as PACK
from offspec.checkpoint.quantised import awq, bnb, compressed, fp8, gptq, modelopt, mxfp4, packs, schemes
from offspec.checkpoint.quantised.parts import INSTEAD, Found, Tensors, even_steps
from offspec.core.errors import UnsupportedModelError

if TYPE_CHECKING:
    from offspec_kernels.dequant import Format


@dataclass(frozen=True, slots=True)
class Method:
    """A way of storing weights in fewer bits.

    Args:
        find: The weights that a `quantization_config` and a checkpoint's tensors have.
        usual: By the `quantization_config` alone, the formats of matrices of about the right size: the first
            that a shape can have. Default: even steps.
        signs: Endings of tensors that only quantised weights have.
        scales: Endings of scales, and of the tensor that they belong to. Inputs, outputs, keys and values
            have scales too (`X.k_scale`), of no use here; with a tensor `X`, `X_scale` is that of a weight.
        experts_alone: Whether all but routed experts are in 16 bits.
    """

    find: Callable[[Mapping[str, Any], Tensors], Iterable[Found]]
    usual: Callable[[Mapping[str, Any]], tuple[Format, ...]] = even_steps
    signs: tuple[str, ...] = ()
    scales: tuple[tuple[str, str], ...] = ()
    experts_alone: bool = False


METHODS = {
    "awq": Method(awq.find, signs=(".qweight",)),
    "bitsandbytes": Method(
        bnb.find,
        lambda settings: even_steps({"bits": 4 if settings.get("load_in_4bit") else 8}),
        signs=(".SCB", ".absmax"),
    ),
    "compressed-tensors": Method(
        compressed.find, schemes.usual, (".weight_packed", ".weight_scale"), (("_scale", ""),)
    ),
    "fp8": Method(fp8.find, fp8.usual, (".weight_scale_inv",), (("_scale_inv", ""),)),
    "gptq": Method(gptq.find, signs=(".qweight",)),
    "modelopt": Method(modelopt.find, schemes.usual, (".weight_scale",), (("_scale", ""),)),
    "mxfp4": Method(mxfp4.find, mxfp4.usual, scales=(("_scales", "_blocks"),), experts_alone=True),
    PACK: Method(packs.find),
}
SIGNS = tuple(sign for method in METHODS.values() for sign in method.signs)
SCALES = {pair for method in METHODS.values() for pair in method.scales}


def name_of(settings: Mapping[str, Any]) -> str:
    """The method that a `quantization_config` names; "" for none."""
    name = settings.get("quant_method")
    if name is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        return "bitsandbytes"  # as it was written before there were others
    return str(name or "")


def method_of(settings: Mapping[str, Any]) -> Method:
    """The method of a `quantization_config`. Raises UnsupportedModelError for one that is not read."""
    name = name_of(settings)
    if name not in METHODS:
        shown = (name or "an unnamed method")[:60]
        shown = shown if shown.isprintable() else ascii(shown)
        raise UnsupportedModelError(
            f"this checkpoint is quantised by {shown}, which is not read "
            f"({', '.join(METHODS)} are): {INSTEAD}"
        )
    return METHODS[name]
