import numba
import pytest

from offspec.core.events import LoadProgress, Notice
from offspec.model import compiling
from offspec.model.compiling import tell_of_compiling


def test_compiling_is_announced_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[LoadProgress | Notice] = []
    double = numba.njit(lambda number: number + number)
    monkeypatch.setattr(compiling, "_QUIET_S", 0.0)
    with tell_of_compiling(heard.append):
        double(1)
    started, ended = heard
    assert isinstance(started, LoadProgress) and "once" in started.stage
    assert isinstance(ended, Notice) and "later runs" in ended.text
    heard.clear()
    with tell_of_compiling(heard.append):
        double(2)
    assert not heard
