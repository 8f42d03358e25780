import numba
import pytest

from offspec.core.events import LoadProgress, Notice
from offspec.model import compile_notice
from offspec.model.compile_notice import notify_compilation


def test_compiling_is_announced_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[LoadProgress | Notice] = []
    double = numba.njit(lambda number: number + number)
    monkeypatch.setattr(compile_notice, "_QUIET_S", 0.0)
    with notify_compilation(events.append):
        double(1)
    started, ended = events
    assert isinstance(started, LoadProgress) and "once" in started.stage
    assert isinstance(ended, Notice) and "later runs" in ended.text
    events.clear()
    with notify_compilation(events.append):
        double(2)
    assert not events
