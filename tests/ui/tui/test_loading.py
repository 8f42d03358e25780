"""The loading view: its text, and that it is laid out only when necessary."""

import pytest
from textual.app import App, ComposeResult

from offspec.core.events import LoadProgress
from offspec.ui.tui.status import LoadingView


class Host(App[None]):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.view = LoadingView("demo", lambda: self.now)

    def compose(self) -> ComposeResult:
        yield self.view


async def test_loading_view_is_laid_out_only_if_its_lines_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = Host()
    async with app.run_test() as pilot:
        app.view._timer.pause()
        laid_out: list[bool] = []
        update = LoadingView.update

        def noted(view: LoadingView, content: str, *, layout: bool = True) -> None:
            laid_out.append(layout)
            update(view, content, layout=layout)

        monkeypatch.setattr(LoadingView, "update", noted)
        for app.now in (0.1, 0.2, 0.3):
            app.view.tick()
        assert laid_out == [False] * 3
        app.view.update_from(LoadProgress("reading the draft", 10, 100, "layers"))
        app.view.tick()
        assert laid_out[3:] == [True]
        await pilot.pause()
        assert app.view.size.height == 4
        app.now = 10.0  # one more digit, and a line may wrap differently
        app.view.tick()
        assert laid_out[4:] == [True]


def test_long_remaining_time_is_shown_in_minutes() -> None:
    view = LoadingView("demo", lambda: 0.0)
    view.update_from(LoadProgress("reading the draft", 0, 100, "layers"))
    view.update_from(LoadProgress("reading the draft", 10, 100, "layers"))
    assert "10 of 100 layers · 9 s left" in view.text(1.0)
    progress = view.text(62.4)
    assert "loading demo · 62.4 s" in progress and "10 of 100 layers · 9 min left" in progress
    assert "loading demo · 2 min" in view.text(124.0)
