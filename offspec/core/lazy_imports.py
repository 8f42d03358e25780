"""Imports that are put off until what they name is used, for packages that another one imports without need.

Python 3.15 has them in the language (PEP 810). Before, they take something that stands in the place of those
packages while the other one is imported.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache, wraps
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from pkgutil import resolve_name
from types import FunctionType, ModuleType
from typing import Any


def import_without(packages: Sequence[str], module: str) -> None:
    """Import a module; what it imports from `packages` is imported when it is used.

    Where something of them is used at once, as another version may do, this stops, and the next import of
    `module` is an ordinary one.

    Args:
        packages: full names. Those that are there already, or are not installed, make no difference.
        module: full name.
    """
    finder = _Finder(package for package in packages if package not in sys.modules)
    sys.meta_path.insert(0, finder)
    try:
        with suppress(Exception):
            import_module(module)
    finally:
        sys.meta_path.remove(finder)
        finder.remove_modules()


class _Finder(Loader):
    """Finds a `_LazyModule` for each of some packages and for all that is in them."""

    def __init__(self, packages: Iterable[str]) -> None:
        self._within = tuple(f"{package}." for package in packages)
        self._modules: dict[str, _LazyModule] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not f"{name}.".startswith(self._within):
            return None
        if name.rpartition(".")[0] not in self._modules and PathFinder.find_spec(name, path) is None:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._modules.setdefault(spec.name, _LazyModule(spec.name))

    def exec_module(self, module: ModuleType) -> None:
        """Leave it empty."""

    def remove_modules(self) -> None:
        """Let the next import find the real ones."""
        for name, module in self._modules.items():
            module.importing = False
            if sys.modules.get(name) is module:
                del sys.modules[name]
            parent, _, child = name.rpartition(".")
            if vars(sys.modules.get(parent, module)).get(child) is module:
                delattr(sys.modules[parent], child)


class _LazyModule(ModuleType):
    """In the place of a module: its names are looked up in the real one when they are used."""

    importing = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        path = f"{self.__name__}.{name}"
        return _Lazy(self, lambda: resolve_name(path)) if self.importing else resolve_name(path)


class _Lazy:
    """In the place of a class or function of such a module, or of what a call of one returns."""

    def __init__(self, module: _LazyModule, find: Callable[[], Any]) -> None:
        self._module, self._find = module, cache(find)

    def _real(self) -> Any:
        if self._module.importing:
            raise RuntimeError(f"{self._module.__name__} is used while it is imported")
        return self._find()

    def __call__(self, *args: Any, **options: Any) -> Any:
        if not self._module.importing:
            return self._real()(*args, **options)
        result = _Lazy(self._module, lambda: self._real()(*args, **options))
        if not (args and isinstance(args[0], FunctionType)):
            return result

        @wraps(args[0])  # a decorator's result must be a function: it may be a method
        def decorated(*args: Any, **options: Any) -> Any:
            return result(*args, **options)

        return decorated

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # which typing looks for
            raise AttributeError(name)
        return getattr(self._real(), name)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._real(),)

    def __instancecheck__(self, instance: Any) -> bool:
        # There are none before the module is imported.
        imported = not isinstance(sys.modules.get(self._module.__name__, self._module), _LazyModule)
        return imported and isinstance(instance, self._real())

    def __or__(self, other: Any) -> Any:  # in an annotation
        return Any

    __ror__ = __or__
