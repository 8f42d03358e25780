"""Finding the quantized weights of a checkpoint, and their formats.

`quantization_config` in config.json names the method. `methods` has an entry for each, and a module per
method knows the names of its tensors. Headers are checked against each other here; values are dequantized
only when the weight is used.
"""

from collections.abc import Mapping
from typing import Any

from offspec.checkpoint.quantized.common import FLOATS, INSTEAD, Tensors, bad_setting
from offspec.checkpoint.quantized.methods import SCALES, WEIGHT_SUFFIXES, method_of
from offspec.checkpoint.tensors import TensorInfo, Weight
from offspec.core.errors import HeaderError


def settings_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the `quantization_config` of a config.json or of its language model; empty if absent."""
    text = config.get("text_config")
    for place in (config, text if isinstance(text, dict) else {}):
        for name in ("quantization_config", "compression_config"):
            found = place.get(name)
            if found is not None and not isinstance(found, dict):
                bad_setting(name, found)
            if found:
                return dict(found)
    return {}


def check_method(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError, naming the method, if a config.json names an unsupported one."""
    if settings := settings_of(config):
        method_of(settings)


def packed_tensors(config: Mapping[str, Any], tensors: Tensors, place: str) -> dict[str, Weight]:
    """Return the weights of a checkpoint by the model's names: quantized ones, and all others unchanged.

    config: its config.json; tensors: the tensors in its headers; place: its name in errors.

    Raises UnsupportedModelError for an unsupported method or variant, HeaderError if tensors and
    configuration contradict each other, MissingTensorError.
    """
    settings = settings_of(config)
    found = list(method_of(settings).find(settings, tensors)) if settings else []
    spent = {name for weight in found for name in weight.consumed}
    left = {name: info for name, info in tensors.items() if name not in spent}
    _refuse_codes(left, place, bool(settings))
    if settings and not found:
        raise HeaderError(
            f"{place}: config.json has a quantization_config, but no weight is quantized; remove it "
            "if the weights are meant to be plain"
        )
    weights: dict[str, Weight] = dict(left)
    for weight in found:
        name = weight.weight.name
        if name in weights:
            twice = "plain and quantized" if name in left else "quantized in two ways"
            raise HeaderError(f"{place} has {name[:200]!r} twice, {twice}; {INSTEAD}")
        weights[name] = weight.weight
    return weights


def _refuse_codes(left: Mapping[str, TensorInfo], place: str, described: bool) -> None:
    """Raise for codes that the configuration does not explain, before they are taken for weights or ignored.

    Integers under another name than a weight's may be a mask of an old checkpoint or a zero point of inputs.
    They are refused only if a model would take them for values.
    """
    for name, info in left.items():
        shown = f"{place}: {name[:200]!r}"
        if name.endswith(".weight") and info.dtype not in FLOATS:
            raise HeaderError(
                f"{shown} is stored as {info.dtype}, and the checkpoint does not describe its encoding; "
                f"{INSTEAD}"
            )
        if name.endswith(WEIGHT_SUFFIXES) or any(
            name.endswith(ending) and name.removesuffix(ending) + of in left for ending, of in SCALES
        ):
            lack = "does not describe its weight" if described else "is absent"
            raise HeaderError(
                f"{shown} belongs to a quantized weight, but quantization_config of config.json {lack}; "
                f"{INSTEAD}"
            )
