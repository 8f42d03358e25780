"""How the weights of a model would be stored, by its configuration alone, for the bytes that they take."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from offspec.checkpoint.pack_manifest import format_of
from offspec.checkpoint.quantised.methods import METHODS, name_of
from offspec.checkpoint.quantised.parts import even_steps
from offspec.checkpoint.quantised.schemes import matches
from offspec.core.config import PackFormat
from offspec.model.quantize.pack.contents import is_router
from offspec_kernels.dequant import Format
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
        method = METHODS.get(name_of(told))
        self._experts_alone = method is not None and method.experts_alone
        self._usual: tuple[Format, ...] = ()
        if quantize is not None:
            self._usual = (format_of(quantize),)
        elif told:
            self._usual = method.usual(told) if method is not None else even_steps(told)

    def of(self, name: str, shape: tuple[int, ...]) -> Format | None:
        """The format of a layer's parameter, of about the right size; None where it is in 16 bits."""
        if len(shape) < 2 or is_router(name) or self._is_left_out(name):
            return None
        if self._experts_alone:
            if len(shape) != 3 or ".experts." not in name:
                return None
        elif shape[-1] % _GROUP:
            return None
        return next((format for format in self._usual if _can_be(format, shape)), None)

    def _is_left_out(self, name: str) -> bool:
        module = name.removesuffix(".weight")
        return any(_fits(pattern, module) for pattern in self._left_out)


def _listed(patterns: Any) -> list[Any]:
    return patterns if isinstance(patterns, list) else []


def _fits(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return matches(pattern, module)
    return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")


def _can_be(format: Format, shape: tuple[int, ...]) -> bool:
    try:
        format.parts(shape)
    except ArgumentError:
        return False
    return True
