"""Public names of `import offspec`, and the cost of the import."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from packaging.version import Version

import offspec
from tests.support.minimum_versions import minimum_versions, requirements

ROOT = Path(__file__).parents[2]

NAMES = """
__version__ load Engine Session Message EngineConfig SamplingParams Constraint Event LoadProgress Notice
Prefill PassProgress PromptLogprobs TextDelta Piece TokenLogprobs TreeSeen PassStats Mismatch Result
Answer Finished Plan ModelInfo Timeline OffspecError RequestError CheckpointError ModelNotFoundError
HeaderError TruncatedError MissingTensorError UnsupportedModelError CapacityError DiskFullError
DraftError PlanError SessionError StreamError ClosedError ContextLengthError
"""
PUBLIC = {*NAMES.split()}


def modules_after(statement: str, *names: str) -> str:
    """Return the named modules that a statement loads in a fresh interpreter."""
    code = f"import sys\n{statement}\nprint([name for name in {names!r} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return shown.stdout.strip()


def test_exported_names() -> None:
    assert set(offspec.__all__) == PUBLIC
    assert len(offspec.__all__) == len(PUBLIC)
    assert set(dir(offspec)) == PUBLIC
    assert all(getattr(offspec, name) is not None for name in PUBLIC)


def test_type_checkers_and_site_know_every_name() -> None:
    text = (ROOT / "offspec/__init__.py").read_text("utf-8").partition("if TYPE_CHECKING:")[2]
    assert PUBLIC - {"__version__"} <= {*re.findall(r"\w+", text)}


def test_every_error_is_exported() -> None:
    errors = import_module("offspec.core.errors")
    defined = {
        name for name, value in vars(errors).items() if isinstance(value, type) and name.endswith("Error")
    }
    assert defined <= PUBLIC


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'levitate'"):
        _ = offspec.levitate


def test_importing_offspec_is_light() -> None:
    heavy = ("torch", "transformers", "numpy", "huggingface_hub", "typer", "rich", "textual")
    assert modules_after("import offspec", *heavy) == "[]"
    assert modules_after("import offspec; offspec.SamplingParams(); offspec.OffspecError", *heavy) == "[]"


@pytest.mark.parametrize("package", ["offspec", "kernels/offspec_kernels", "planners/offspec_planners"])
def test_types_are_shipped(package: str) -> None:
    assert (ROOT / package / "py.typed").exists()


def test_every_requirement_has_one_minimum_version() -> None:
    pinned = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().lower().replace("_", "-").splitlines()
        if not line.startswith("#")
    )
    lowest = minimum_versions(requirements())
    assert lowest["transformers"] and lowest["starlette"]
    for name, floor in lowest.items():
        tested = pinned.get(name.lower().replace("_", "-"))
        assert tested is None or Version(tested) >= Version(floor), name


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["numpy"], "'numpy' has no floor"),
        (["numpy==2.0"], "has no floor"),
        (["rich>=13.8", "rich[all]>=14"], "rich has two floors"),
    ],
)
def test_requirements_without_a_clear_minimum_are_refused(texts: list[str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        minimum_versions(texts)


def test_minimum_versions_with_extras_bounds_and_markers() -> None:
    texts = ["ray[data]>=2.60", "mkdocs-material>=9.8,<10", "triton>=3.6; sys_platform == 'linux'"]
    assert minimum_versions(texts) == {"ray": "2.60", "mkdocs-material": "9.8", "triton": "3.6"}
