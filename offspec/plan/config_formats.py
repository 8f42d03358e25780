"""How the weights of a model would be stored, by its configuration alone, for the bytes that they take."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from offspec.checkpoint.pack_manifest import format_of
from offspec.checkpoint.quantised.schemes import matches
from offspec.core.config import PackFormat
from offspec.model.quantize.pack.contents import is_router
from offspec_kernels.dequant import Format
from offspec_kernels.dequant.float4 import Mxfp4
from offspec_kernels.dequant.float8 import Float8
from offspec_kernels.dequant.grouped import BITS, Grouped
from offspec_kernels.errors import ArgumentError

_GROUP = 64  # of columns, of which rounded matrices have a whole number
_LEFT_OUT = ("modules_to_not_convert", "ignore", "exclude_modules")  # settings that list modules


class ConfigFormats:
    """The formats of the weights of decoder layers.

    Args:
        settings: The `quantization_config` of a config.json; None: there is none.
        quantize: What matrices are rounded to besides. Default None: as they are.
    """

    def __init__(self, settings: Any, quantize: PackFormat | None = None) -> None:
        told: Mapping[str, Any] = settings if isinstance(settings, dict) and quantize is None else {}
        self._left_out = [
            str(pattern) for name in _LEFT_OUT for pattern in _listed(told.get(name)) if quantize is None
        ]
        self._usual = format_of(quantize) if quantize is not None else _usual(told)

    def of(self, name: str, shape: tuple[int, ...]) -> Format | None:
        """The format of a layer's parameter, of about the right size; None where it is in 16 bits."""
        if self._usual is None or len(shape) < 2 or is_router(name) or self._is_left_out(name):
            return None
        if isinstance(self._usual, Mxfp4):
            is_experts = len(shape) == 3 and ".experts." in name
            return self._usual if is_experts and _can_be(self._usual, shape) else None
        if shape[-1] % _GROUP:
            return None
        by_rows = Float8(None, "channel") if isinstance(self._usual, Float8) else self._usual
        return next((format for format in (self._usual, by_rows) if _can_be(format, shape)), None)

    def _is_left_out(self, name: str) -> bool:
        module = name.removesuffix(".weight")
        return any(_fits(pattern, module) for pattern in self._left_out)


def _listed(patterns: Any) -> list[Any]:
    return patterns if isinstance(patterns, list) else []


def _fits(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return matches(pattern, module)
    return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")


def _usual(settings: Mapping[str, Any]) -> Format | None:
    """The format that most matrices are in."""
    if not settings:
        return None
    method, bits = settings.get("quant_method"), settings.get("bits")
    if method == "mxfp4":
        return Mxfp4()
    algorithm = str(settings.get("quant_algo"))
    floats = method == "fp8" or algorithm == "FP8"
    if settings.get("load_in_4bit") or "FP4" in algorithm:
        bits = 4  # NVFP4 takes 4.5, as even steps in groups do
    for group in dict(settings.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        bits = weights.get("num_bits", bits)
        floats = floats or (bits == 8 and str(weights.get("type")) == "float")
    if not floats:
        return Grouped(bits if bits in BITS else 8)
    block = settings.get("weight_block_size")
    try:
        return Float8((block[0], block[1]), "block", rounded=False) if block else Float8(None, "channel")
    except (ArgumentError, TypeError, IndexError, KeyError):  # no numbers
        return Float8(None, "channel")


def _can_be(format: Format, shape: tuple[int, ...]) -> bool:
    try:
        format.parts(shape)
    except ArgumentError:
        return False
    return True
