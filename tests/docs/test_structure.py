"""Code structure: top-level contents, and no import cycles between files."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"offspec": "", "offspec_kernels": "kernels", "offspec_planners": "planners"}
NAMES = "core checkpoint sampling chat stream model draft plan engine distill server ray ui"


def _files(package: str) -> dict[str, Path]:
    """Return the modules of a package by dotted name."""
    base = ROOT / PACKAGES[package]
    found = {}
    for file in (base / package).rglob("*.py"):
        parts = file.relative_to(base).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def _imports(file: Path, modules: dict[str, Path]) -> Iterator[str]:
    """Modules that a file imports, including type-only and late imports, but without parent packages."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in modules or node.module in modules:
                    yield whole if whole in modules else node.module


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_cycles_between_files(package: str) -> None:
    modules = _files(package)
    # The public names of `offspec` are resolved on use, so its own file is left out.
    graph = {
        name: set(_imports(file, modules)) - {name} for name, file in modules.items() if name != "offspec"
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_every_package_is_in_the_diagram() -> None:
    picture = (ROOT / "docs" / "images" / "layers.svg").read_text("utf-8")
    assert all(f">{name}<" in picture for name in (*NAMES.split(), "offspec_kernels", "offspec_planners"))


def test_top_level_contents() -> None:
    found = {item.name for item in (ROOT / "offspec").iterdir() if item.name != "__pycache__"}
    assert found == {"__init__.py", "__main__.py", "py.typed", *NAMES.split()}
    assert not any((ROOT / folder / "__init__.py").exists() for folder in ("kernels", "planners"))
