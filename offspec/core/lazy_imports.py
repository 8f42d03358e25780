"""Deferred imports of packages that another package imports unnecessarily.

Python 3.15 has lazy imports in the language (PEP 810). In earlier versions, placeholder modules replace such
packages while the other package is imported.
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
    """Import a module, deferring its imports from `packages` until they are used.

    If the module uses one of them during its import, as another version might, the import is abandoned, and
    the next import of `module` is an ordinary one.

    Args:
        packages: Full names of packages. Packages that are already imported or not installed have no effect.
        module: Full name of the module.
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
    """Import hook that returns a `_LazyModule` for some packages and all their submodules."""

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
        """Leave the module empty."""

    def remove_modules(self) -> None:
        """Remove the placeholders, so that the next import finds the real modules."""
        for name, module in self._modules.items():
            module.importing = False
            if sys.modules.get(name) is module:
                del sys.modules[name]
            parent, _, child = name.rpartition(".")
            if vars(sys.modules.get(parent, module)).get(child) is module:
                delattr(sys.modules[parent], child)


class _LazyModule(ModuleType):
    """Placeholder for a module, which looks its names up in the real module when they are used."""

    importing = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        path = f"{self.__name__}.{name}"
        return _Lazy(self, lambda: resolve_name(path)) if self.importing else resolve_name(path)


class _Lazy:
    """Placeholder for a class or function of a lazy module, or for the result of calling one."""

    def __init__(self, module: _LazyModule, find: Callable[[], Any]) -> None:
        self._module, self._find = module, cache(find)

    def _real(self) -> Any:
        if self._module.importing:
            raise RuntimeError(f"{self._module.__name__} was used during its import")
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
        if name.startswith("__"):  # typing looks these up
            raise AttributeError(name)
        return getattr(self._real(), name)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._real(),)

    def __instancecheck__(self, instance: Any) -> bool:
        # No instance exists before the module is imported.
        imported = not isinstance(sys.modules.get(self._module.__name__, self._module), _LazyModule)
        return imported and isinstance(instance, self._real())

    def __or__(self, other: Any) -> Any:  # in an annotation
        return Any

    __ror__ = __or__
