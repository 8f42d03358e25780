"""Temporary replacement of attributes of other packages, from several threads."""

from threading import Barrier, Thread
from types import ModuleType
from typing import Any

import pytest

from offspec.core.monkeypatch import Replacement, monkeypatched


class _Base:
    def __init__(self) -> None:
        self.made = "base"


class _Derived(_Base):
    pass


def _doubled(own: object) -> object:
    return (own, own)


def _module(**names: int) -> Any:
    module = ModuleType("other_package")
    vars(module).update(names)
    return module


def _names(module: Any) -> dict[str, object]:
    return {name: value for name, value in vars(module).items() if not name.startswith("__")}


def test_original_is_always_restored() -> None:
    owner = _module(first=1, second=2)
    both = [Replacement(owner, name, _doubled) for name in ("first", "second")]
    with pytest.raises(ValueError), monkeypatched(both):
        assert _names(owner) == {"first": (1, 1), "second": (2, 2)}
        raise ValueError
    assert _names(owner) == {"first": 1, "second": 2}


def test_inherited_attribute_is_inherited_again() -> None:
    with monkeypatched([Replacement(_Derived, "__init__", lambda own: lambda self: None)]):
        assert not vars(_Derived())
    assert "__init__" not in vars(_Derived) and _Derived().made == "base"


def test_missing_attribute_undoes_all_replacements() -> None:
    owner = _module(there=1)
    both = [Replacement(owner, name, _doubled) for name in ("there", "absent")]
    with pytest.raises(AttributeError), monkeypatched(both):
        pass
    assert _names(owner) == {"there": 1}
    with monkeypatched([Replacement(owner, "there", _doubled)]):
        assert owner.there == (1, 1)
    assert owner.there == 1


def test_two_threads_share_a_replacement() -> None:
    owner, barrier = _module(there=1), Barrier(2, timeout=20)
    one = [Replacement(owner, "there", _doubled)]
    seen = list[object]()

    def other() -> None:
        with monkeypatched(one):
            barrier.wait()  # both are inside
            barrier.wait()  # the first one has left
            seen.append(owner.there)

    thread = Thread(target=other)
    thread.start()
    with monkeypatched(one):
        barrier.wait()
        seen.append(owner.there)
    barrier.wait()
    thread.join()
    assert seen == [(1, 1), (1, 1)] and owner.there == 1
