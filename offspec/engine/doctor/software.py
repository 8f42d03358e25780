"""Check of installed package versions, without importing the packages."""

import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

import offspec
from offspec.engine.doctor.finding import DoctorOptions, Finding

_PACKAGES = ("torch", "transformers", "triton", "numba", "numpy", "safetensors", "huggingface_hub")
_NEEDED_ON_GPUS = ("triton",)  # included in the CUDA build of torch


def check(options: DoctorOptions) -> Iterator[Finding]:
    """Yield one finding: packages with versions, and those that are missing or too old for offspec."""
    versions = {name: _version(name) for name in _PACKAGES}
    shown = ", ".join(f"{name} {found}" for name, found in versions.items() if found)
    found = f"offspec {offspec.__version__}, Python {platform.python_version()}, {shown}"
    figures = {
        "offspec": offspec.__version__,
        "python": sys.version.split()[0],
        "system": platform.platform(),
    }
    wrong = _wrong()
    if wrong:
        yield Finding(
            "software",
            "failed",
            f"{found}; offspec needs {', '.join(wrong)}",
            "pip install " + " ".join(f"'{requirement}'" for requirement in wrong),
            {**figures, **versions},
        )
    else:
        yield Finding("software", "ok", found, figures={**figures, **versions})


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _wrong() -> list[str]:
    """Return offspec's unmet requirements; empty if offspec was not installed as a package."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(text) for text in requires("offspec") or ()]
    except PackageNotFoundError:
        return []
    wrong = list[str]()
    for needed in requirements:
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        found = _version(needed.name)
        if found is None or not needed.specifier.contains(found, prereleases=True):
            wrong.append(f"{needed.name}{needed.specifier}")
    return wrong
