"""GPTQ weights with 2, 3, 4 or 8 bits (arXiv 2210.17323), in the layout of AutoGPTQ and GPTQModel.

`X.qweight` int32 [in · bits / 32, out], `X.qzeros` int32 [in / group, out · bits / 32], `X.scales`
[in / group, out], and `X.g_idx` int32 [in], the group of each input; with `desc_act` groups are sorted by
importance. Format "gptq" stores each zero point less 1, "gptq_v2" stores it unchanged.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from offspec.checkpoint.quantized.common import (
    INSTEAD,
    FoundWeight,
    Tensors,
    bad_setting,
    bad_tensor,
    has_act_order,
    matrix_shape,
    packed_weight,
    read_bytes,
    require_tensor,
    setting,
)
from offspec.checkpoint.tensors import TensorInfo, torch_dtype
from offspec.core.errors import UnsupportedModelError

_VERSIONS = {"gptq": True, "gptq_v2": False}  # whether 1 is added to the stored zero points


@dataclass(frozen=True, slots=True)
class _GptqConfig:
    """Settings in config.json that apply to all weights.

    desc_act: groups are sorted by importance, so only `g_idx` assigns inputs to groups. symmetric: every zero
    point is the middle of the range.
    """

    version: str
    bits: int
    group: int
    desc_act: bool
    symmetric: bool


def find(settings: Mapping[str, Any], tensors: Tensors) -> Iterator[FoundWeight]:
    """Yield each weight with a `qweight`. Raises UnsupportedModelError for other formats and other widths."""
    version = str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()
    bits = setting(settings, "bits", usual=4)
    if version not in _VERSIONS or settings.get("is_marlin_format") or bits not in (2, 3, 4, 8):
        raise UnsupportedModelError(
            f"this checkpoint uses an unsupported variant of GPTQ (format {version[:40]!r}, "
            f"{bits} bits; only gptq and gptq_v2 with 2, 3, 4 or 8 bits are supported): {INSTEAD}"
        )
    dynamic = settings.get("dynamic")
    if dynamic is not None and not isinstance(dynamic, dict):
        bad_setting("dynamic", dynamic)
    for rule in dynamic or ():
        if not str(rule).startswith("-:"):  # a rule with a minus names modules that are not quantized
            raise UnsupportedModelError(
                f"this checkpoint is quantized by GPTQ with separate settings for {str(rule)[:60]!r}, "
                f"which is not supported: {INSTEAD}"
            )
    form = _GptqConfig(
        version,
        bits,
        setting(settings, "group_size", usual=128),
        desc_act=bool(settings.get("desc_act")) and not settings.get("static_groups"),
        symmetric=settings.get("sym") is True,
    )
    for name in tensors:
        if name.endswith(".qweight"):
            yield _weight(name.removesuffix(".qweight"), form, tensors)


def _weight(module: str, form: _GptqConfig, tensors: Tensors) -> FoundWeight:
    from offspec_kernels.dequant.gptq import Gptq

    parts = {part: require_tensor(tensors, f"{module}.{part}") for part in ("qweight", "qzeros", "scales")}
    qweight, scales = parts["qweight"], parts["scales"]
    words, outputs = matrix_shape(qweight)
    inputs = words * 32 // form.bits
    size = inputs if form.group == -1 else form.group
    index = tensors.get(f"{module}.g_idx")
    if form.desc_act and size < inputs:
        index = require_tensor(tensors, f"{module}.g_idx")
    if index:
        if index.shape != (inputs,):
            bad_tensor(
                index, f"must have {inputs} numbers for {qweight.name[:200]!r}, not {list(index.shape)}"
            )
        if has_act_order(index, size):
            parts["g_idx"] = index
    ordered, plus_one = "g_idx" in parts, _VERSIONS[form.version]
    make = partial(Gptq, form.bits, form.group, ordered, plus_one, torch_dtype(scales.dtype))
    others = [index.name] if index else []
    found = packed_weight(f"{module}.weight", (outputs, inputs), make, parts, others)
    if form.symmetric and form.bits != 3:  # 3-bit zero points straddle words
        _check_version(parts["qzeros"], form)
    return found


def _check_version(zeros: TensorInfo, form: _GptqConfig) -> None:
    """Check the version by the middle of the range, which each version stores as another number."""
    first = int.from_bytes(read_bytes(replace(zeros, shape=(1,), nbytes=4), 4), "little")
    for version, less_one in _VERSIONS.items():
        middle = 2 ** (form.bits - 1) - less_one
        word = sum(middle << place for place in range(0, 32, form.bits))
        if first == word and version != form.version:
            bad_tensor(zeros, f"is of format {version}, but config.json says {form.version}", INSTEAD)
