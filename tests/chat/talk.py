"""What the tests of a desk say to it, and how they read what comes back."""

from collections.abc import Iterator

from offspec.chatting.desk import Desk
from offspec.chatting.opening import Setup
from offspec.chatting.outcomes import Say
from offspec.config import EngineConfig, SamplingParams
from offspec.events import Event, Finished

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
    outcome = desk.run(line)
    assert isinstance(outcome, Say)
    return outcome.markdown
