"""The lowest versions that pyproject.toml allows, as constraints for pip.

`make test-floors` writes them to a file: python tests/support/minimum_versions.py > floors.txt
"""

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
_FLOOR = re.compile(r"([\w.-]+)(?:\[[^]]*\])?>=([\w.]+)(?:,<[\w.]+)?(?:;.*)?")
_OWN_EXTRAS = re.compile(r"offspec\[.*\]")


def requirements() -> list[str]:
    """Every requirement of the package and of its extras, as written."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    groups: Iterable[list[str]] = [project["dependencies"], *project["optional-dependencies"].values()]
    return [text for group in groups for text in group if not _OWN_EXTRAS.fullmatch(text)]


def minimum_versions(texts: Iterable[str]) -> dict[str, str]:
    """Lowest version of each package.

    Raises:
        ValueError: A requirement has no floor, or two requirements of a package have different floors.
    """
    found: dict[str, str] = {}
    for text in texts:
        match = _FLOOR.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} has no floor: write name>=version")
        name, floor = match.groups()
        if found.setdefault(name, floor) != floor:
            raise ValueError(f"{name} has two floors: {found[name]} and {floor}")
    return found


def main() -> None:
    for name, floor in minimum_versions(requirements()).items():
        print(f"{name}=={floor}")


if __name__ == "__main__":
    main()
