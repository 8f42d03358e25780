"""The `config_groups` of compressed-tensors: bits and groups of each module.

The targets of a group are module names, "re:" and a regular expression, or a class such as "Linear".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from offspec.checkpoint.quantized.common import BLOCK_UNIT, INSTEAD, bad_setting, setting, uniform_formats
from offspec.core.errors import HeaderError, UnsupportedModelError

if TYPE_CHECKING:
    from offspec_kernels.dequant import Format

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized")
Strategy = Literal["tensor", "channel", "group", "block", "tensor_group"]
_MOST_WAYS, _NAME = 10**10, 64  # limit on ways to match an expression; assumed length of a module's name
_ONE_CHARACTER = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]")
_REPEATED_GROUP = re.compile(r"\)\s*[*+{]")


@dataclass(frozen=True, slots=True)
class Scheme:
    """Storage scheme of some modules' weights.

    Args:
        targets: The modules.
        bits: Bits per code.
        floats: Whether codes are floats.
        strategy: Range of a scale: the whole "tensor", a "channel" (a row), a "group" of inputs in a row, or
            a "block" of rows and columns. "tensor_group" has scales of groups and one of the whole tensor.
        group: Inputs per group, if any.
        block: Rows and columns per block, if any.
        symmetric: Whether there are no zero points.
        act_order: Whether inputs are grouped by importance, so that only `g_idx` assigns them to groups.
    """

    targets: tuple[str, ...]
    bits: int
    floats: bool
    strategy: Strategy
    group: int
    block: tuple[int, int] | None
    symmetric: bool
    act_order: bool


def schemes_of(settings: Mapping[str, Any]) -> list[Scheme]:
    """Return the schemes of a `quantization_config` that concern weights.

    Raises UnsupportedModelError, naming the format, for an unsupported one; HeaderError for a damaged one.
    """
    groups = settings.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        bad_setting("config_groups", groups)
    with_weights = [group for group in groups.values() if group.get("weights")]
    _refuse(settings, [group.get("format") for group in with_weights])
    return [_scheme(group) for group in with_weights]


def scheme_of(module: str, schemes: list[Scheme]) -> Scheme:
    """Return the scheme with the best target, in the library's order: a name, an expression, a class."""
    kind = "Embedding" if "embed" in module.rpartition(".")[2] else "Linear"
    pairs = sorted(
        ((target, scheme) for scheme in schemes for target in scheme.targets), key=lambda pair: pair[0]
    )
    named = [scheme for target, scheme in pairs if target == module]
    named = named or [scheme for target, scheme in pairs if matches(target, module)]
    named = named or [scheme for target, scheme in pairs if target == kind]
    if not named:
        raise HeaderError(
            f"config.json: no group of quantization_config applies to {module[:200]!r}; download it again"
        )
    return named[0]


def default_formats(settings: Mapping[str, Any]) -> tuple[Format, ...]:
    """Return `QuantMethod.default_formats`. Model Optimizer has such groups, or one algorithm for all."""
    from offspec_kernels.dequant.float8 import Float8

    algorithm = str(settings.get("quant_algo"))
    # NVFP4 takes 4.5 bits, as grouped uniform steps do.
    bits, floats = 4 if "FP4" in algorithm else settings.get("bits"), algorithm == "FP8"
    for group in dict(settings.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        bits = weights.get("num_bits", bits)
        floats = floats or (bits == 8 and str(weights.get("type")) == "float")
    return (Float8(None, "channel"),) if floats else uniform_formats({"bits": bits})


def _refuse(settings: Mapping[str, Any], own: list[object]) -> None:
    """Raise for an unsupported format. own: the formats of the groups, which override the global one."""
    sparsity = settings.get("sparsity_config") or {}
    formats = [sparsity.get("format") if isinstance(sparsity, dict) else "sparse", *own]
    if not own or not all(own):
        formats.append(settings.get("format"))
    for name in formats:
        if name and name not in (*_FORMATS, "dense"):
            raise UnsupportedModelError(
                f"this checkpoint is compressed as {str(name)[:60]!r}, which is not supported "
                f"(only {', '.join(_FORMATS)} are): {INSTEAD}"
            )
    transforms = settings.get("transform_config") or {}
    if not isinstance(transforms, dict) or transforms.get("config_groups"):
        raise UnsupportedModelError(
            f"this checkpoint transforms its inputs (transform_config), which is not supported: {INSTEAD}"
        )


def _scheme(group: Mapping[str, Any]) -> Scheme:
    weights, targets = group["weights"], group.get("targets")
    if not isinstance(weights, dict):
        bad_setting("weights", weights)
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        bad_setting("targets", targets)
    size, strategy = setting(weights, "group_size", usual=0), weights.get("strategy")
    if strategy is None:
        strategy = "group" if size > 0 else "channel" if size == -1 else "tensor"
    if strategy not in get_args(Strategy) or (strategy.endswith("group") and size <= 0):
        bad_setting("strategy", strategy)
    symmetric = weights.get("symmetric", True)
    if not isinstance(symmetric, bool):
        bad_setting("symmetric", symmetric)
    return Scheme(
        targets=tuple(targets),
        bits=setting(weights, "num_bits", usual=8),
        floats=str(weights.get("type", "int")).lower() == "float",
        strategy=cast("Strategy", strategy),
        group=size,
        block=_block(weights.get("block_structure")) if strategy == "block" else None,
        symmetric=symmetric,
        act_order=str(weights.get("actorder")).lower() in ("group", "dynamic", "true"),
    )


def _block(value: object) -> tuple[int, int]:
    """Return rows and columns; older files have them as "128x128"."""
    sizes = value.split("x") if isinstance(value, str) else value
    if not isinstance(sizes, list) or len(sizes) != 2:
        bad_setting("block_structure", value)
    rows, columns = (int(size) if str(size).isdecimal() and len(str(size)) < 10 else 0 for size in sizes)
    if not rows or not columns or rows % BLOCK_UNIT or columns % BLOCK_UNIT:
        bad_setting("block_structure", value)
    return rows, columns


def matches(target: str, module: str) -> bool:
    """Return whether a target is "re:" and a regular expression that matches the start of a module's name.

    Raises UnsupportedModelError for an expression that may take too long, HeaderError for an invalid one.
    """
    if not target.startswith("re:"):
        return False
    expression = target.removeprefix("re:")
    if not _is_safe_regex(expression):
        raise UnsupportedModelError(
            f"config.json: matching the target {expression[:60]!r} of quantization_config may never finish, "
            f"so it is refused: {INSTEAD}"
        )
    try:
        return re.match(expression, module) is not None
    except (re.error, RecursionError, OverflowError):
        bad_setting("targets", target)


def _is_safe_regex(expression: str) -> bool:
    """Return whether the ways in which an expression can fail to match are few enough to try all.

    Ways of a sequence multiply, those of alternatives add up, and those of a repeated group are unbounded.
    """
    bare = _ONE_CHARACTER.sub("x", expression)
    if not expression.isprintable() or _REPEATED_GROUP.search(bare):  # a comment could precede the star
        return False
    ways = [[0, 1]]  # per open group: ways of its alternatives so far, and of the current one
    for character in bare:
        if character == "(":
            ways.append([0, 1])
        elif character == ")" and len(ways) > 1:
            group = sum(ways.pop())
            ways[-1][1] *= group
        elif character == "|":
            ways[-1] = [sum(ways[-1]), 1]
        elif character in "*+{?":
            ways[-1][1] *= 2 if character == "?" else _NAME
        if ways[-1][1] > _MOST_WAYS:
            return False
    return sum(ways[0]) <= _MOST_WAYS
