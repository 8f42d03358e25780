"""Which of a checkpoint's tensors are weights in fewer bits, and in which format.

`quantization_config` in config.json names the method, for which `methods` has an entry, and a file for each
method knows what its tensors are called. They are checked against each other by their headers; what they hold
is made into values only where the weight is used.
"""

from collections.abc import Mapping
from typing import Any

from offspec.checkpoint.quantised.methods import SCALES, SIGNS, method_of
from offspec.checkpoint.quantised.parts import FLOATS, INSTEAD, Tensors, bad_setting
from offspec.checkpoint.tensors import TensorInfo, Weight
from offspec.core.errors import HeaderError


def settings_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `quantization_config` of a config.json or of the language model in it; empty without one."""
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
    """Raise UnsupportedModelError, by its name, if a config.json names a method that is not read."""
    if settings := settings_of(config):
        method_of(settings)


def packed_tensors(config: Mapping[str, Any], tensors: Tensors, place: str) -> dict[str, Weight]:
    """The weights of a checkpoint by the model's names: those in fewer bits, and all others as they are.

    config: its config.json; tensors: what its headers list; place: what to call it in an error.

    Raises UnsupportedModelError for a method or a form of it that is not read, HeaderError where tensors and
    configuration contradict each other, MissingTensorError.
    """
    settings = settings_of(config)
    found = list(method_of(settings).find(settings, tensors)) if settings else []
    spent = {name for weight in found for name in weight.spent}
    left = {name: info for name, info in tensors.items() if name not in spent}
    _refuse_codes(left, place, bool(settings))
    if settings and not found:
        raise HeaderError(
            f"{place}: config.json has a quantization_config, and none of the weights is quantised; take it "
            "out if they are meant to be plain"
        )
    weights: dict[str, Weight] = dict(left)
    for weight in found:
        name = weight.weight.name
        if name in weights:
            twice = "plain and packed" if name in left else "packed in two ways"
            raise HeaderError(f"{place} has {name[:200]!r} twice, {twice}; {INSTEAD}")
        weights[name] = weight.weight
    return weights


def _refuse_codes(left: Mapping[str, TensorInfo], place: str, described: bool) -> None:
    """Refuse numbers that the configuration does not explain, before they are taken for weights, or
    ignored.

    Those under any other name than a weight's may be a mask that old checkpoints hold, or a zero point of
    inputs: they are refused where a model would take them for values.
    """
    for name, info in left.items():
        shown = f"{place}: {name[:200]!r}"
        if name.endswith(".weight") and info.dtype not in FLOATS:
            raise HeaderError(
                f"{shown} is stored as {info.dtype}, and the checkpoint does not say what its numbers stand "
                f"for; {INSTEAD}"
            )
        if name.endswith(SIGNS) or any(
            name.endswith(ending) and name.removesuffix(ending) + of in left for ending, of in SCALES
        ):
            lack = "no weight that goes with it is described" if described else "there is none"
            raise HeaderError(
                f"{shown} belongs to a quantised weight, which quantization_config of config.json should say "
                f"how to read, and {lack}; {INSTEAD}"
            )
