"""Helpers of the chat tests: input to a chat, and its output."""

from collections.abc import Iterator

from offspec.core.config import EngineConfig
from offspec.core.events import Event, Finished
from offspec.core.sampling_defaults import SamplingOverrides
from offspec.ui.chat.command_results import ShowText
from offspec.ui.chat.controller import ChatController
from offspec.ui.chat.handlers import run_command
from offspec.ui.chat.setup import ChatSetup

SETUP = ChatSetup(EngineConfig("demo"), SamplingOverrides({"max_tokens": 100, "temperature": 0.5}))
ANSWER = "The sky is blue because of scattering."


def say(chat: ChatController, text: str) -> str:
    """Ask, and return the text of the answer."""
    return finished(chat.ask(text))


def finished(events: Iterator[Event]) -> str:
    last = list(events)[-1]
    assert isinstance(last, Finished)
    return last.result.text


def said(chat: ChatController) -> list[str]:
    return [message.content for message in chat.session.messages]


def shown(chat: ChatController, line: str) -> str:
    outcome = run_command(chat, line)
    assert isinstance(outcome, ShowText)
    return outcome.markdown
