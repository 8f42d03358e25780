"""Helpers of the session tests: messages and answers."""

from collections.abc import Iterable
from pathlib import Path

from offspec.chat.conversation import Conversation
from offspec.chat.session import Session
from offspec.core.events import Event, Finished, Result

LONG = "one two three four five six seven eight nine ten eleven twelve"


def said(session: Session) -> list[str]:
    return [message.content for message in session.messages]


def on_disk(file: Path) -> list[tuple[str, str | None]]:
    return [(message.content, message.finish) for message in Conversation.read(file).messages]


def result_of(events: Iterable[Event]) -> Result:
    """Return the result of an answer that finishes."""
    last = list(events)[-1]
    assert isinstance(last, Finished)
    return last.result


def stop_at(session: Session, events: Iterable[Event], kind: type[Event]) -> list[Event]:
    """Read an answer, and stop it at the first event of a type."""
    read = []
    for event in events:
        read.append(event)
        if isinstance(event, kind):
            session.stop()
    return read
