"""What came of a command, done on the screen."""

from pathlib import Path
from typing import TYPE_CHECKING

from offspec.core.errors import OffspecError, RequestError
from offspec.ui.chat.commands import parse
from offspec.ui.chat.handlers import run_command
from offspec.ui.chat.outcomes import (
    Copy,
    OpenView,
    Outcome,
    Quit,
    Reload,
    Reset,
    Rewound,
    ShowSources,
    ShowText,
    StreamAnswer,
    View,
)
from offspec.ui.chat.report import report
from offspec.ui.tui.answer import LEGEND
from offspec.ui.tui.page_screen import HelpScreen, PageScreen
from offspec.ui.tui.sessions_screen import SessionsScreen
from offspec.ui.tui.tree_screen import TreeScreen
from offspec_planners.plan.explain import explain

if TYPE_CHECKING:
    from offspec.ui.tui.app import ChatApp


async def show_command(app: "ChatApp", line: str) -> None:
    """Run a command and show what came of it. One that is refused says why.

    The engine's thread may be ahead of the screen: an answer is over when the screen says so.
    """
    try:
        command = parse(line)[0]
        if app.controller is None or app.is_loading:
            await _without_a_model(app, command.name)
        elif app.answer is None or command.while_busy:
            await _do(app, run_command(app.controller, line))
        elif app.asking.stopping:
            app.asking.next_command = line
        else:
            raise RequestError("stop the answer first (Esc)")
    except OffspecError as error:
        await app.transcript.note(str(error), "error")


async def _without_a_model(app: "ChatApp", name: str) -> None:
    if name == "quit":
        await app.action_quit()
    elif name == "help":
        app.push_screen(HelpScreen())
    else:
        raise RequestError(f"the model is still loading; /{name} works once it is there")


async def _do(app: "ChatApp", outcome: Outcome) -> None:
    transcript = app.transcript
    match outcome:
        case ShowText(markdown):
            await transcript.note(markdown)
        case StreamAnswer(events, question, dropped):
            await transcript.remove_messages(dropped)
            asked = None if question is None else await transcript.ask(question)
            await app.asking.begin(events, asked, edits=bool(dropped))
        case Rewound(dropped, text):
            await transcript.remove_messages(dropped)
            if text is not None:
                app.composer.prepend(text)
            app.show_figures()
        case Reset(note):
            await app.show_conversation()
            await transcript.note(note, "notice")
        case ShowSources(shown):
            transcript.show_sources(shown)
            app.status.doing(LEGEND if shown else "")
        case Reload(config):
            app.load(config)
        case Copy(text, what):
            app.copy_to_clipboard(text)
            await transcript.note(f"Copied {what}.", "notice")
        case OpenView(view):
            _open(app, view)
        case Quit():
            await app.action_quit()


def _open(app: "ChatApp", view: View) -> None:
    assert app.controller is not None
    match view:
        case "help":
            app.push_screen(HelpScreen())
        case "tree":
            app.push_screen(TreeScreen(app.controller.trees))
        case "stats":
            app.push_screen(PageScreen("Figures", report(app.controller)))
        case "plan":
            assert app.controller.engine.plan is not None
            app.push_screen(PageScreen("Plan", "\n\n".join(explain(app.controller.engine.plan))))
        case "sessions":

            async def chosen(file: Path | None) -> None:
                if file is not None:
                    await show_command(app, f"/load {file}")

            app.push_screen(SessionsScreen(app.archive), chosen)
