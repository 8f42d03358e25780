"""Extension of griffe: settings on the site as `help` shows them, rather than as they are declared."""

import inspect
from importlib import import_module
from typing import Any

import griffe


class PlainSettings(griffe.Extension):  # type: ignore[misc, unused-ignore] # no types where it is absent
    """Gives the classes of settings the docstring and the types that they have at runtime."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called by griffe when a package is loaded."""
        if pkg.name != "offspec":
            return
        for name in ("EngineConfig", "SamplingParams"):
            found = pkg["core.config"][name]
            settings = getattr(import_module("offspec.core.config"), name)
            found.docstring.value = inspect.getdoc(settings)
            for parameter in found.parameters:
                parameter.annotation = _plain(parameter.annotation)
            for member in found.members.values():
                if member.is_attribute:
                    member.annotation = _plain(member.annotation)


def _plain(annotation: Any) -> Any:
    """The type of `Annotated[type, ...]`; another annotation as it is."""
    if isinstance(annotation, griffe.ExprSubscript) and str(annotation.left) == "Annotated":
        arguments: Any = annotation.slice
        return arguments.elements[0]
    return annotation
