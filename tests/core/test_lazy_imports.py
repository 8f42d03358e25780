"""Lazy imports: deferred until the imported name is first used."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from offspec.core.lazy_imports import import_without

HEAVY = """
class Base:
    def answer(self):
        return 42

def decorate(function, times=1):
    return lambda *args: times * function(*args)

def with_options(times):
    return lambda function: decorate(function, times)

LIMIT = 7
"""
USER = """
import heavy.parts as parts
from heavy import Base, decorate, with_options
from heavy.parts import Base as Other

def make(base: Base | None = None, other: "list[Other]" = None) -> None | Base:
    return Base()

class User:
    @decorate
    def doubled(self, value):
        return 2 * value

@with_options(3)
def tripled(value):
    return value

def is_base(value):
    return isinstance(value, Base)
"""


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package `heavy` with a module `parts`, and modules that import the package."""
    (tmp_path / "heavy").mkdir()
    (tmp_path / "heavy" / "__init__.py").write_text(HEAVY)
    (tmp_path / "heavy" / "parts.py").write_text(HEAVY)
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "subclass.py").write_text("from heavy import Base\nclass Derived(Base): pass\n")
    (tmp_path / "careful.py").write_text(
        "try:\n    import absent\nexcept ImportError:\n    absent = None\nfrom heavy import LIMIT\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("heavy", "heavy.parts", "user", "subclass", "careful"):
        sys.modules.pop(name, None)


def _user() -> Any:
    import_without(("heavy",), "user")
    assert "user" in sys.modules and not [name for name in sys.modules if name.startswith("heavy")]
    return sys.modules["user"]


def test_names_are_imported_on_use() -> None:
    user = _user()
    assert user.make().answer() == 42
    assert user.Base.answer is import_module("heavy").Base.answer
    assert user.Other is not user.Base and user.Other().answer() == 42


def test_decorators_are_applied_on_call() -> None:
    user = _user()
    assert user.User.doubled.__name__ == "doubled"
    assert "heavy" not in sys.modules
    assert user.User().doubled(5) == 10 and user.tripled(5) == 15


def test_unimported_classes_have_no_instances() -> None:
    user = _user()
    assert not user.is_base(1)
    assert "heavy" not in sys.modules
    assert user.is_base(import_module("heavy").Base()) and not user.is_base(1)


def test_bound_module_finds_real_names() -> None:
    user = _user()
    assert user.parts.LIMIT == 7
    assert user.parts.LIMIT is import_module("heavy.parts").LIMIT
    heavy = import_module("heavy")
    assert heavy.LIMIT == 7 and Path(heavy.__file__ or "").name == "__init__.py"


def test_immediate_use_imports_as_usual() -> None:
    import_without(("heavy",), "subclass")
    assert "subclass" not in sys.modules
    assert import_module("subclass").Derived().answer() == 42


def test_missing_packages_make_no_difference() -> None:
    heavy = import_module("heavy")
    import_without(("heavy", "absent"), "careful")
    careful = sys.modules["careful"]
    assert (careful.LIMIT, careful.absent) == (7, None)
    assert sys.modules["heavy"] is heavy
