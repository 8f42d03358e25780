"""What the tests of a desk say to it, and how they read what comes back."""

from collections.abc import Iterator

from offspec.core.config import EngineConfig, SamplingParams
from offspec.core.events import Event, Finished
from offspec.ui.chat.controller import Desk
from offspec.ui.chat.handlers import run_command
from offspec.ui.chat.outcomes import Say
from offspec.ui.chat.setup import Setup

SETUP = Setup(EngineConfig("demo"), SamplingParams(max_tokens=100))
ANSWER = "The sky is blue because of scattering."


def say(desk: Desk, text: str) -> str:
    """The text of the answer."""
    return finished(desk.ask(text))


def finished(events: Iterator[Event]) -> str:
    last = list(events)[-1]
    assert isinstance(last, Finished)
    return last.result.text


def said(desk: Desk) -> list[str]:
    return [message.content for message in desk.session.messages]


def shown(desk: Desk, line: str) -> str:
    outcome = run_command(desk, line)
    assert isinstance(outcome, Say)
    return outcome.markdown
