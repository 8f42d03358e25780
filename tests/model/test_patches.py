"""Changes to transformers, torch and jinja: only those listed, and only during offspec's calls."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import offspec
from offspec.model.patches import PATCHES, unwrapped, wrap
from tests.support.tiny_models import write_config, write_hybrid
from tests.support.wrappers import small_whole

SOURCES = Path(offspec.__file__).parent
# Names used in code that changes something outside of offspec.
CHANGING = {
    *("monkeypatched", "Replacement", "TorchFunctionMode", "TorchDispatchMode", "meta_path", "settrace"),
    *("AttentionInterface", "ALL_EXPERTS_FUNCTIONS", "register_module_parameter_registration_hook"),
    *("set_verbosity", "set_verbosity_error", "simplefilter", "set_num_threads", "manual_seed"),
    *("_accelerator_setAllocatorSettings", "GOMP_SPINCOUNT", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"),
}
# Modules that use such a name without changing anything themselves: two enter a mode of another module.
HARMLESS = {"core.monkeypatch", "model.device_transfers", "model.opened"}


def test_an_application_finds_transformers_unchanged(tmp_path: Path) -> None:
    """Outside of offspec's calls, while an engine is open and after it was closed."""
    models = [
        str(write_hybrid(tmp_path / "hybrid", "qwen3_next")),
        str(write_config(tmp_path / "llava", small_whole("llava"))),
    ]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.support.application", *models]
    found = json.loads(subprocess.check_output(command, text=True, env=paths).splitlines()[-1])
    assert len(found) == 2 * len(models)
    assert found == {key: [] for key in found}


def _named(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            whole = ast.unparse(node)
            if node.attr != "manual_seed" or whole == "torch.manual_seed":
                yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _sources() -> Iterator[tuple[str, ast.Module]]:
    for file in sorted(SOURCES.rglob("*.py")):
        name = ".".join(file.relative_to(SOURCES).with_suffix("").parts)
        yield name, ast.parse(file.read_text(encoding="utf-8"))


def test_the_list_names_every_module_that_changes_something() -> None:
    listed = {module for patch in PATCHES for module in patch.by}
    changing = {name for name, tree in _sources() if CHANGING & set(_named(tree))}
    assert listed == changing - HARMLESS


def test_only_one_module_replaces_forwards() -> None:
    assigned = {
        name
        for name, tree in _sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "forward" and not isinstance(node.ctx, ast.Load)
    }
    assert assigned == {"model.patches"}


def _more(forward: object, by: int, values: torch.Tensor) -> torch.Tensor:
    assert callable(forward)
    found: torch.Tensor = forward(values) + by
    return found


def test_wrapped_forwards_nest_and_are_undone() -> None:
    module, zero = torch.nn.Identity(), torch.zeros(1)
    undo_first = wrap(module, _more, 1)
    undo_second = wrap(module, _more, 20)
    assert module(zero) == 21
    undo_second()
    assert module(zero) == 1
    undo_first()
    assert module(zero) == 0 and "forward" not in vars(module)


def test_an_unwrapped_copy_shares_the_parts() -> None:
    module = torch.nn.Linear(2, 2)
    wrap(module, _more, 1)
    twin, rows = unwrapped(module), torch.ones(1, 2)
    assert twin.weight is module.weight and torch.equal(twin(rows) + 1, module(rows))
