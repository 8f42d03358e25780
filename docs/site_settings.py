"""Extension of griffe: settings on the site without what their declarations add to their types."""

from typing import Any

import griffe


class PlainSettings(griffe.Extension):  # type: ignore[misc, unused-ignore] # no types where it is absent
    """Gives settings their plain types."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called by griffe when a package is loaded."""
        if pkg.name != "offspec":
            return
        for name in ("EngineConfig", "SamplingParams"):
            found = pkg["core.config"][name]
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
