"""Triton's interpreter scans its whole language whenever a kernel calls a function; this limits it."""

from types import ModuleType
from typing import Any


def patch_once() -> None:
    """Let a launch replace a module's names at the first call that needs them, not at each call."""
    from triton.runtime import interpreter

    patch_lang, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    if patch_lang.__module__ == __name__:
        return
    done: set[ModuleType] = set()
    wanted: dict[Any, set[ModuleType]] = {}

    def patch_missing(function: Any) -> Any:
        if function not in wanted:
            modules = (interpreter.tl, interpreter.tl.core)
            names = function.__globals__.values()
            wanted[function] = {module for module in modules if any(value is module for value in names)}
        if wanted[function] and wanted[function] <= done:
            return interpreter._LangPatchScope()
        done.update(wanted[function])
        return patch_lang(function)

    def launch_afresh(self: Any, *arguments: Any, **options: Any) -> None:
        done.clear()  # a launch restores what it replaced
        try:
            launch(self, *arguments, **options)
        finally:
            done.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_missing, launch_afresh
